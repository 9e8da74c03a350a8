"""A turn says when workers took it over from others.

Revision: 0021, after 0020.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column("turns", sa.Column("takeovers", JSONB, comment="claims of expired leases: [{at, owner, lost}]"))


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("turns", "takeovers")
