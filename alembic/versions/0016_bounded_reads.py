"""Indexes for lists and retention, a column for abandoned consolidations, and dry runs of case pruning.

With the indexes, the LIMIT of a query also bounds the rows that the query reads. The indexes are built concurrently,
without blocking readers or writers. Each statement that builds an index commits separately. If the migration is
interrupted, the next run repeats all statements.

Revision: 0016, after 0015.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

readable_from = "0016"

_WAITING = "ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL"

_INDEXES = {
    "sessions_created_at_idx": ("sessions", ["created_at", "session_id"], None),
    "sessions_of_user_idx": ("sessions", ["user_id", "created_at", "session_id"], None),
    "sessions_waiting_idx": ("sessions", ["ended_at"], _WAITING),
    "sessions_consolidation_due_idx": ("sessions", [sa.text("coalesce(consolidation_due_at, ended_at)")], _WAITING),
    "sessions_given_up_idx": (
        "sessions",
        ["consolidation_given_up_at", "session_id"],
        "consolidation_given_up_at IS NOT NULL",
    ),
    "sessions_given_up_of_user_idx": (
        "sessions",
        ["user_id", "consolidation_given_up_at", "session_id"],
        "consolidation_given_up_at IS NOT NULL",
    ),
    "deliveries_over_idx": ("deliveries", ["created_at"], "status <> 'pending'"),
    "snapshots_set_aside_idx": ("snapshots", ["saved_at"], "set_aside"),
}
_REPLACED = {
    "sessions_user_id_idx": (["user_id", "created_at"], None),
    "sessions_unconsolidated_idx": (["ended_at"], "ended_at IS NOT NULL AND consolidated_at IS NULL"),
}
_ONE_RUN = "case_runs_one_at_a_time_key"
_ONE_DRY_RUN = "case_runs_one_dry_run_key"
_DRY_RUN = "case_runs_dry_run_check"


def upgrade() -> None:
    """Apply the migration."""
    with op.get_context().autocommit_block():
        op.execute("ALTER TABLE sessions ADD COLUMN IF NOT EXISTS consolidation_given_up_at timestamptz")
        op.execute(
            "COMMENT ON COLUMN sessions.consolidation_given_up_at IS "
            "'when its last run failed; not tried again unless asked'"
        )
        for name, (table, columns, condition) in _INDEXES.items():
            _build(name, table, columns, condition)
        for name in _REPLACED:
            op.drop_index(name, table_name="sessions", if_exists=True, postgresql_concurrently=True)
    _add_dry_runs()


def _build(name: str, table: str, columns: list[Any], condition: str | None) -> None:
    """Build an index concurrently. First drops the invalid index that an interrupted build may have left."""
    op.drop_index(name, table_name=table, if_exists=True, postgresql_concurrently=True)
    where = None if condition is None else sa.text(condition)
    op.create_index(name, table, columns, postgresql_where=where, postgresql_concurrently=True)


def _add_dry_runs() -> None:
    """Allow dry runs in `case_runs`. One transaction suffices, because the table has only a few hundred rows."""
    op.add_column(
        "case_runs",
        sa.Column(
            "dry_run", sa.Boolean(), server_default=sa.false(), nullable=False, comment="it makes a plan and ends"
        ),
    )
    # A worker of the previous release continues a dry run like a normal run. This constraint then rejects the phases
    # that remove cases.
    op.create_check_constraint(op.f(_DRY_RUN), "case_runs", "NOT dry_run OR phase IN ('planning', 'done')")
    op.drop_index(_ONE_RUN, table_name="case_runs")
    op.create_index(
        _ONE_RUN,
        "case_runs",
        [sa.literal_column("(true)")],
        unique=True,
        postgresql_where=sa.text("finished_at IS NULL AND NOT dry_run"),
    )
    op.create_index(
        _ONE_DRY_RUN,
        "case_runs",
        [sa.literal_column("(true)")],
        unique=True,
        postgresql_where=sa.text("finished_at IS NULL AND dry_run"),
    )


def downgrade() -> None:
    """Revert the migration."""
    op.execute("DELETE FROM case_runs WHERE dry_run")
    op.drop_index(_ONE_DRY_RUN, table_name="case_runs")
    op.drop_index(_ONE_RUN, table_name="case_runs")
    op.create_index(
        _ONE_RUN,
        "case_runs",
        [sa.literal_column("(true)")],
        unique=True,
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.drop_constraint(op.f(_DRY_RUN), "case_runs", type_="check")
    op.drop_column("case_runs", "dry_run")
    with op.get_context().autocommit_block():
        for name, (columns, condition) in _REPLACED.items():
            _build(name, "sessions", columns, condition)
        for name, (table, _, _) in _INDEXES.items():
            op.drop_index(name, table_name=table, if_exists=True, postgresql_concurrently=True)
        op.execute("ALTER TABLE sessions DROP COLUMN IF EXISTS consolidation_given_up_at")
