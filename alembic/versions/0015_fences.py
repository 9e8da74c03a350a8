"""A random nonce for each session, in addition to the fencing token.

Revision: 0015, after 0014.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

readable_from = "0013"


def upgrade() -> None:
    """Apply the migration. A session gets its nonce when a worker next claims the session."""
    op.add_column(
        "sessions",
        sa.Column("nonce", sa.Uuid(), nullable=True, comment="drawn with each claim; the fence's other half"),
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("sessions", "nonce")
