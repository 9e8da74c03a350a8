"""Indexes that return the sweeper's work in the order in which the work is due.

The sweeper wakes sessions, ends sessions, and publishes deliveries. The indexes are built concurrently. Each statement
commits separately. If the migration is interrupted, the next run repeats all statements.

Revision: 0017, after 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

readable_from = "0016"

_SINCE = "coalesce(woken_at, '-infinity'::timestamptz)"

_INDEXES = {
    "sessions_wake_idx": (
        "sessions",
        ["priority", sa.text("least(wakes, 6)"), sa.text(_SINCE)],
        "unsettled > 0 AND not_before IS NULL",
    ),
    "sessions_postponed_idx": (
        "sessions",
        ["paced", sa.text("least(wakes, 6)"), "not_before"],
        "unsettled > 0 AND not_before IS NOT NULL",
    ),
    "sessions_postponed_woken_at_idx": ("sessions", ["woken_at"], "unsettled > 0 AND not_before IS NOT NULL"),
    "sessions_ending_wake_idx": (
        "sessions",
        [sa.text("least(wakes, 6)"), sa.text(_SINCE)],
        "end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0",
    ),
    "deliveries_wake_idx": ("deliveries", [sa.text("greatest(due_at, wake_at)")], "status = 'pending'"),
}


def _columns() -> list[tuple[str, sa.Column[object]]]:
    return [
        (
            "sessions",
            sa.Column(
                "priority",
                sa.SmallInteger(),
                server_default="5",
                nullable=False,
                comment="the highest of the turns accepted since it last had none unsettled",
            ),
        ),
        (
            "sessions",
            sa.Column(
                "paced",
                sa.Boolean(),
                server_default="false",
                nullable=False,
                comment="while not_before is set: its turn waits for a model, and is woken with a few others",
            ),
        ),
        (
            "deliveries",
            sa.Column(
                "wake_at",
                sa.DateTime(timezone=True),
                nullable=True,
                comment="not published before; NULL: when it is due",
            ),
        ),
        (
            "deliveries",
            sa.Column(
                "wakes",
                sa.Integer(),
                server_default="0",
                nullable=False,
                comment="the sweeper's wake-ups since the last attempt",
            ),
        ),
    ]


def upgrade() -> None:
    """Apply the migration."""
    _drop_indexes()  # an interrupted build leaves an invalid index
    with op.get_context().autocommit_block():
        for table, column in _columns():
            op.add_column(table, column, if_not_exists=True)
        for name, (table, keys, condition) in _INDEXES.items():
            op.create_index(name, table, keys, postgresql_where=sa.text(condition), postgresql_concurrently=True)
        op.drop_index("deliveries_due_idx", table_name="deliveries", if_exists=True, postgresql_concurrently=True)
        # The previous release did not set `paced` for sessions that wait for a model. This statement finds these
        # sessions through sessions_postponed_idx.
        op.execute(
            "UPDATE sessions SET paced = true "
            "WHERE unsettled > 0 AND not_before IS NOT NULL AND NOT paced AND state <> 'waiting_approval'"
        )


def _drop_indexes() -> None:
    with op.get_context().autocommit_block():
        for name, (table, _, _) in _INDEXES.items():
            op.drop_index(name, table_name=table, if_exists=True, postgresql_concurrently=True)


def downgrade() -> None:
    """Revert the migration."""
    _drop_indexes()
    with op.get_context().autocommit_block():
        op.drop_index("deliveries_due_idx", table_name="deliveries", if_exists=True, postgresql_concurrently=True)
        op.create_index(
            "deliveries_due_idx",
            "deliveries",
            ["due_at"],
            postgresql_where=sa.text("status = 'pending'"),
            postgresql_concurrently=True,
        )
        for table, column in _columns():
            op.drop_column(table, column.name, if_exists=True)
