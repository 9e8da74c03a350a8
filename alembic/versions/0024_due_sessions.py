"""The indexes of due and of queued sessions serve only the statements that are made for them.

While little is due, these indexes are nearly empty, and PostgreSQL preferred reading all of one to looking up a user's
sessions in another. Only a statement with a condition on `priority` implies the condition of the index of due sessions,
the new part of which is always true. The others' conditions have a form that their statements share.

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

_WAITING = "ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL"

# The name, the columns and the condition of an index.
_Index = tuple[str, Sequence[str], str]

_NEW: Sequence[_Index] = (
    (
        "sessions_due_idx",
        ("priority", "least(wakes, 6)", "coalesce(woken_at, '-infinity'::timestamptz)"),
        f"{_DUE} AND priority IS NOT NULL",
    ),
    (
        "sessions_queued_place_idx",
        ("(md5(user_id) || user_id)",),
        f"CASE WHEN {_QUEUED} THEN true ELSE false END",
    ),
    (
        "sessions_waiting_of_user_idx",
        ("user_id", "ended_at", "session_id"),
        f"CASE WHEN {_WAITING} THEN true ELSE false END",
    ),
)

_FORMER: Sequence[_Index] = (
    ("sessions_wake_idx", _NEW[0][1], _DUE),
    ("sessions_queued_user_idx", _NEW[1][1], _QUEUED),
)

_INVALID = sa.text("SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(:name) AND NOT indisvalid")


def upgrade() -> None:
    """Apply the migration. Workers of the release before read more rows meanwhile."""
    _replace(_FORMER, _NEW)


def downgrade() -> None:
    """Revert the migration."""
    _replace(_NEW, _FORMER)


def _replace(former: Sequence[_Index], new: Sequence[_Index]) -> None:
    """Build the new indexes, then drop the former ones. It may be interrupted at any point, and run again."""
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        for name, columns, condition in new:
            if op.get_bind().execute(_INVALID, {"name": name}).first() is not None:  # an interrupted build
                op.drop_index(name, "sessions", postgresql_concurrently=True)
            op.create_index(
                name,
                "sessions",
                [sa.text(column) for column in columns],
                postgresql_where=sa.text(condition),
                postgresql_concurrently=True,
                if_not_exists=True,
            )
        for name, _, _ in former:
            op.drop_index(name, "sessions", postgresql_concurrently=True, if_exists=True)
