"""A turn has the names of the tools that do not fit its prompts.

Revision: 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column("turns", sa.Column("tools_left_out", JSONB, comment="names of tools that do not fit its prompts"))


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("turns", "tools_left_out")
