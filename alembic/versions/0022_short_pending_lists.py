"""Limits the pending list of each full-text index to 64 kB. PostgreSQL's default is 4 MB.

When an insert fills the pending list of a GIN index, the insert also moves the whole list into the index. This delays
the turn that made the insert. With messages of 10,000 characters, the delay was 0.3 to 0.4 s for a list of 4 MB, and
0.06 s for a list of 64 kB. Each search also reads the whole list. Without a list (`fastupdate = off`), a turn with
short messages writes 21 kB of WAL instead of 8 kB.

All releases read and write as before. Each statement commits separately. If the migration is interrupted, the next run
repeats all statements.

Revision: 0022, after 0021.
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

readable_from = "0016"

_INDEXES = ("message_words_words_idx", "memories_words_idx")


def upgrade() -> None:
    """Apply the migration."""
    with op.get_context().autocommit_block():
        for index in _INDEXES:
            op.execute(f"ALTER INDEX {index} SET (gin_pending_list_limit = 64)")


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        for index in _INDEXES:
            op.execute(f"ALTER INDEX {index} RESET (gin_pending_list_limit)")
