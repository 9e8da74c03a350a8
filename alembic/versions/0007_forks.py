"""Forks: which session one is a copy of; and what finds every session that nobody has asked to end.

Routing's index holds no forks, which end like any other when nobody uses them. The index is
built while everybody else reads and writes. Each statement commits by itself, so this may stop
half-way; it is run again from the beginning then.

Revision: 0007, after 0006.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_INDEX = "sessions_open_idx"


def upgrade() -> None:
    """Go up."""
    downgrade()  # an index whose building was broken off is there, and of no use
    op.add_column(
        "sessions", sa.Column("forked_from", sa.Uuid(), nullable=True, comment="the session that it was copied from")
    )
    with op.get_context().autocommit_block():
        op.create_index(
            _INDEX,
            "sessions",
            ["session_id"],
            postgresql_where=sa.text("end_requested_at IS NULL"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    """Go down."""
    with op.get_context().autocommit_block():
        op.drop_index(_INDEX, table_name="sessions", if_exists=True, postgresql_concurrently=True)
    op.drop_column("sessions", "forked_from", if_exists=True)
