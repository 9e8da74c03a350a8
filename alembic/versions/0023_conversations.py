"""Conversations with a title, and an index on sessions by user and scope.

The caller identifies a conversation by a key. A session belongs to a conversation if its `scope` contains a slash
followed by the key of the conversation. The previous release writes no scope with a slash. It treats a session of a
conversation as a session of another channel.

The index is built concurrently. Each statement commits separately. If the migration is interrupted, the next run
repeats all statements.

Revision: 0023, after 0022.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

readable_from = "0016"

_INDEX = "sessions_of_scope_idx"


def upgrade() -> None:
    """Apply the migration."""
    _drop_index()  # an interrupted build leaves an invalid index
    with op.get_context().autocommit_block():
        op.create_table(
            "conversations",
            sa.Column("user_id", sa.Text(), sa.ForeignKey("users.user_id"), nullable=False),
            sa.Column("conversation", sa.Text(), nullable=False, comment="the caller's key"),
            sa.Column("title", sa.Text(), nullable=False),
            sa.Column(
                "titled",
                sa.Boolean(),
                nullable=False,
                server_default=sa.text("false"),
                comment="a caller set the title; summaries do not replace it",
            ),
            sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True),
            sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
            sa.PrimaryKeyConstraint("user_id", "conversation"),
            comment="Conversations that callers named.",
            if_not_exists=True,
        )
        op.create_index(
            _INDEX, "sessions", ["user_id", "scope", "created_at", "session_id"], postgresql_concurrently=True
        )


def downgrade() -> None:
    """Revert the migration. Sessions of conversations remain; a message reaches them only by `session_id`."""
    _drop_index()
    with op.get_context().autocommit_block():
        op.drop_table("conversations", if_exists=True)


def _drop_index() -> None:
    with op.get_context().autocommit_block():
        op.drop_index(_INDEX, table_name="sessions", if_exists=True, postgresql_concurrently=True)
