"""A turn keeps the instructions that a function of its agent made, so that a later worker uses the same.

Revision: 0005, after 0004.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column("turns", sa.Column("instructions", sa.Text, comment="what a function of the agent made for the turn"))


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("turns", "instructions")
