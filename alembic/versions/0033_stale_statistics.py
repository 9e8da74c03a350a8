"""The table of tables whose planner statistics may have samples of erased rows. Workers analyze these tables.

Revision: 0033, after 0032.
"""

from __future__ import annotations

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

readable_from = "0016"


def upgrade() -> None:
    """Apply the migration."""
    op.execute(
        "CREATE TABLE IF NOT EXISTS stale_statistics "
        "(table_name text NOT NULL, erased_at timestamptz NOT NULL, due_at timestamptz NOT NULL, "
        "CONSTRAINT stale_statistics_pkey PRIMARY KEY (table_name))"
    )
    op.execute(
        "COMMENT ON TABLE stale_statistics IS 'Tables whose planner statistics may have samples of erased rows.'"
    )
    op.execute("COMMENT ON COLUMN stale_statistics.erased_at IS 'when rows were last erased'")
    op.execute("COMMENT ON COLUMN stale_statistics.due_at IS 'when a worker may analyze the table'")


def downgrade() -> None:
    """Revert the migration."""
    op.execute("DROP TABLE stale_statistics")
