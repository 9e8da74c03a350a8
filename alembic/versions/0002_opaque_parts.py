"""A message keeps what its provider needs back: signatures, thoughts and ids, as the provider sent them.

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


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("messages", "opaque")
