"""The index of due sessions serves only statements that read them by priority.

While little is due, the index is nearly empty, and PostgreSQL preferred reading all of it to looking up a user's
sessions.

Revision: 0024, after 0023.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

readable_from = "0001"

_COLUMNS = ("priority", sa.text("least(wakes, 6)"), sa.text("coalesce(woken_at, '-infinity'::timestamptz)"))
_DUE = "unsettled > 0 AND not_before IS NULL"


def upgrade() -> None:
    """Apply the migration. Workers of the release before use either index."""
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index("sessions_due_idx", "sessions", postgresql_concurrently=True, if_exists=True)
        op.create_index(
            "sessions_due_idx",
            "sessions",
            _COLUMNS,
            postgresql_where=sa.text(f"{_DUE} AND priority IS NOT NULL"),
            postgresql_concurrently=True,
        )
        op.drop_index("sessions_wake_idx", "sessions", postgresql_concurrently=True, if_exists=True)


def downgrade() -> None:
    """Revert the migration."""
    op.create_index("sessions_wake_idx", "sessions", _COLUMNS, postgresql_where=sa.text(_DUE))
    op.drop_index("sessions_due_idx", "sessions")
