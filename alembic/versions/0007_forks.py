"""A column for the session that a fork was copied from, and an index on all sessions without a requested end.

A fork ends after inactivity, like any session. The index for routing excludes forks, so the search for idle sessions
needs an index that includes them. This index is built concurrently. Each statement commits separately. If the migration
is interrupted, the next run repeats all statements.

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
    """Apply the migration."""
    downgrade()  # an interrupted build leaves an invalid index
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
    """Revert the migration."""
    with op.get_context().autocommit_block():
        op.drop_index(_INDEX, table_name="sessions", if_exists=True, postgresql_concurrently=True)
    op.drop_column("sessions", "forked_from", if_exists=True)
