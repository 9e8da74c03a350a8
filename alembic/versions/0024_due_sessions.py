"""The indexes of due and of queued sessions serve only the statements that are made for them.

While little is due, these indexes are nearly empty, and PostgreSQL preferred reading all of one to looking up a user's
sessions in another. Only a statement with a condition on `priority` implies the condition of the index of due sessions,
the new part of which is always true. The other's condition has a form that its statements share.

Revision: 0024, after 0023.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

readable_from = "0001"

_DUE = "unsettled > 0 AND not_before IS NULL"
_QUEUED = "unsettled > 0 AND queued_at IS NOT NULL"

# The former and the new name, the columns, and the former and the new condition.
_INDEXES: Sequence[tuple[str, str, Sequence[str], str, str]] = (
    (
        "sessions_wake_idx",
        "sessions_due_idx",
        ("priority", "least(wakes, 6)", "coalesce(woken_at, '-infinity'::timestamptz)"),
        _DUE,
        f"{_DUE} AND priority IS NOT NULL",
    ),
    (
        "sessions_queued_user_idx",
        "sessions_queued_place_idx",
        ("(md5(user_id) || user_id)",),
        _QUEUED,
        f"CASE WHEN {_QUEUED} THEN true ELSE false END",
    ),
)


def upgrade() -> None:
    """Apply the migration. Workers of the release before read more rows meanwhile."""
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        for former, name, columns, _, condition in _INDEXES:
            op.drop_index(name, "sessions", postgresql_concurrently=True, if_exists=True)
            op.create_index(
                name,
                "sessions",
                [sa.text(column) for column in columns],
                postgresql_where=sa.text(condition),
                postgresql_concurrently=True,
            )
            op.drop_index(former, "sessions", postgresql_concurrently=True, if_exists=True)


def downgrade() -> None:
    """Revert the migration."""
    for former, name, columns, condition, _ in _INDEXES:
        op.create_index(former, "sessions", [sa.text(each) for each in columns], postgresql_where=sa.text(condition))
        op.drop_index(name, "sessions")
