"""A message keeps how its reply ended, and what its provider needs back: signatures, thoughts and ids.

Revision: 0002, after 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column(
        "messages",
        sa.Column("opaque", JSONB, comment="what the provider needs back, with its endpoint and model family"),
    )
    op.alter_column("messages", "stop_reason", comment="how the model's reply ended, such as stop or length")


def downgrade() -> None:
    """Revert the migration."""
    op.alter_column("messages", "stop_reason", comment="why the model's reply is incomplete, such as length")
    op.drop_column("messages", "opaque")
