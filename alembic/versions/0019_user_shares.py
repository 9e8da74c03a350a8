"""Sessions can wait because their user has reached the limit on concurrent turns.

One index finds a user's waiting sessions. The other index finds the user's sessions that have unsettled turns and no
`not_before`. The `not_before` of a waiting session is in the future. The previous release therefore does not claim the
session before that time.

The indexes are built concurrently. Each statement commits separately. If the migration is interrupted, the next run
repeats all statements.

Revision: 0019, after 0018.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

readable_from = "0016"

_INDEXES = {
    "sessions_admitted_idx": (["user_id"], "unsettled > 0 AND not_before IS NULL"),
    "sessions_queued_idx": (
        ["user_id", sa.text("priority DESC"), "queued_at"],
        "unsettled > 0 AND queued_at IS NOT NULL",
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    _drop_indexes()  # an interrupted build leaves an invalid index
    with op.get_context().autocommit_block():
        op.add_column(
            "sessions",
            sa.Column(
                "queued_at",
                sa.DateTime(timezone=True),
                nullable=True,
                comment="waits since then for one of its user's turns to settle; NULL: it does not",
            ),
            if_not_exists=True,
        )
        for name, (keys, condition) in _INDEXES.items():
            op.create_index(name, "sessions", keys, postgresql_where=sa.text(condition), postgresql_concurrently=True)


def downgrade() -> None:
    """Revert the migration. Sessions that wait because of their user's limit on concurrent turns become due at once."""
    _drop_indexes()
    with op.get_context().autocommit_block():
        op.execute(
            "UPDATE sessions SET not_before = NULL, woken_at = NULL, queued_at = NULL "
            "WHERE unsettled > 0 AND queued_at IS NOT NULL"
        )
        op.drop_column("sessions", "queued_at", if_exists=True)


def _drop_indexes() -> None:
    with op.get_context().autocommit_block():
        for name in _INDEXES:
            op.drop_index(name, table_name="sessions", if_exists=True, postgresql_concurrently=True)
