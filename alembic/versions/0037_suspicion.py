"""Which turn is charged with the death of its process, and since when a turn waits for a worker that can run it.

Revision: 0037, after 0036.
"""

from __future__ import annotations

from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

readable_from = "0016"

_COLUMNS = {
    "sessions.deaths": ("integer NOT NULL DEFAULT 0", "processes that died during its turn since the last progress"),
    "sessions.blamed_token": ("bigint", "token of the claim whose process died; the death is charged to a turn"),
    "sessions.unequipped_since": ("timestamptz", "when a worker first lacked the agent or a tool of its turn"),
    "turns.attempt_error": ("text", "why the last attempt failed"),
}


def upgrade() -> None:
    """Apply the migration."""
    for name, (kind, comment) in _COLUMNS.items():
        table, column = name.split(".")
        op.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column} {kind}")
        op.execute(f"COMMENT ON COLUMN {name} IS '{comment}'")


def downgrade() -> None:
    """Revert the migration."""
    op.execute("ALTER TABLE turns DROP COLUMN attempt_error")
    op.execute("ALTER TABLE sessions DROP COLUMN unequipped_since, DROP COLUMN blamed_token, DROP COLUMN deaths")
