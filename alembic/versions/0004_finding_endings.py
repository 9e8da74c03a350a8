"""Indexes on sessions whose end was requested, and on sessions that have a previous session.

The migration also adds a foreign key for the previous session. The migration reads the whole table of sessions without
blocking readers or writers. Each statement commits separately. If the migration is interrupted, the next run repeats
all statements.

Revision: 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_FOREIGN_KEY = "sessions_previous_session_id_fkey"
_INDEXES = {
    "sessions_ending_idx": ("end_requested_at", "end_requested_at IS NOT NULL AND ended_at IS NULL"),
    "sessions_previous_session_id_idx": ("previous_session_id", "previous_session_id IS NOT NULL"),
}


def upgrade() -> None:
    """Apply the migration."""
    downgrade()  # an interrupted build leaves an invalid index
    with op.get_context().autocommit_block():
        op.create_foreign_key(
            op.f(_FOREIGN_KEY),
            "sessions",
            "sessions",
            ["previous_session_id"],
            ["session_id"],
            postgresql_not_valid=True,  # validating the key in this statement would block all writers
        )
        op.execute(f"ALTER TABLE sessions VALIDATE CONSTRAINT {_FOREIGN_KEY}")
        for name, (column, condition) in _INDEXES.items():
            op.create_index(
                name, "sessions", [column], postgresql_where=sa.text(condition), postgresql_concurrently=True
            )


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        for name in _INDEXES:
            op.drop_index(name, table_name="sessions", if_exists=True, postgresql_concurrently=True)
        op.drop_constraint(_FOREIGN_KEY, "sessions", type_="foreignkey", if_exists=True)
