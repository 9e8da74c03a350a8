"""An agent of another library has an output beside its text, and results of tools that are no text.

Revision: 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column("turns", sa.Column("data", JSONB, comment="the output of the turn, beside the text of its reply"))
    op.add_column(
        "tool_effects",
        sa.Column("payload", JSONB, comment="the result as the agent's library needs it, until the step commits it"),
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("tool_effects", "payload")
    op.drop_column("turns", "data")
