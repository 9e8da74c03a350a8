"""An index on the forks of a session.

Revision: 0013, after 0012.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.create_index(
        "sessions_forked_from_idx",
        "sessions",
        ["forked_from"],
        postgresql_where=sa.text("forked_from IS NOT NULL"),
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_index("sessions_forked_from_idx", table_name="sessions")
