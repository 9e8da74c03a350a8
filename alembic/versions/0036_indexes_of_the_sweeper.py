"""Indexes for the sweeper: idle sessions by their last activity, and the shares of users, models and receivers.

Revision: 0036, after 0035.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

readable_from = "0016"

_SERVICE = (
    "md5(coalesce(lower(substring(target ->> 'url', '^[^:/?#]+://(?:[^/?#@]*@)?([^/?#]*)')), "
    "'task ' || coalesce(target ->> 'queue', target ->> 'task'), 'channel ' || (target ->> 'channel'), ''))"
)

_INDEXES = {
    "sessions_idle_idx": ("sessions", ["last_activity_at"], "end_requested_at IS NULL"),
    "sessions_queued_user_idx": (
        "sessions",
        [sa.text("(md5(user_id) || user_id)")],
        "unsettled > 0 AND queued_at IS NOT NULL",
    ),
    "sessions_parked_idx": (
        "sessions",
        [sa.text("coalesce(parked_for, '')"), sa.text("least(wakes, 6)"), "not_before"],
        "unsettled > 0 AND not_before IS NOT NULL AND paced",
    ),
    "unrouted_user_idx": (
        "unrouted",
        [sa.text("(md5(user_id) || user_id)"), "position"],
        "settled_at IS NULL",
    ),
    "deliveries_service_idx": (
        "deliveries",
        [sa.text(_SERVICE), sa.text("greatest(due_at, wake_at)")],
        "status = 'pending'",
    ),
}
_OPEN = "sessions_open_idx"


def upgrade() -> None:
    """Apply the migration."""
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")  # the builds wait for older transactions, and block no others
        for name, (table, columns, where) in _INDEXES.items():
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
            op.create_index(name, table, columns, postgresql_where=sa.text(where), postgresql_concurrently=True)
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_OPEN}")


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_OPEN}")
        op.create_index(
            _OPEN,
            "sessions",
            ["session_id"],
            postgresql_where=sa.text("end_requested_at IS NULL"),
            postgresql_concurrently=True,
        )
        for name in _INDEXES:
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
