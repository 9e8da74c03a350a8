"""The word indexes take each row at once, without a list of pending entries.

With GIN's `fastupdate`, the insert that fills the list (4 MB) moves all of it into the index: one turn in some hundreds
settled 0.3 s late after users had written long texts. Until then each search read the whole list.

No release reads or writes differently. Each statement commits by itself, so this may stop half-way; it is run again
from the beginning then.

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
    """Go up."""
    with op.get_context().autocommit_block():
        for index in _INDEXES:
            op.execute(f"ALTER INDEX {index} SET (fastupdate = off)")
            op.execute(f"SELECT gin_clean_pending_list('{index}')")


def downgrade() -> None:
    """Go down."""
    with op.get_context().autocommit_block():
        for index in _INDEXES:
            op.execute(f"ALTER INDEX {index} RESET (fastupdate)")
