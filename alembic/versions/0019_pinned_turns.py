"""A turn has the fingerprint of its agent, so that it may be left to workers with the same.

Revision: 0019, after 0018.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column("turns", sa.Column("fingerprint", sa.Text, comment="of its agent, in the worker that last began it"))


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("turns", "fingerprint")
