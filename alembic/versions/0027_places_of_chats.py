"""For each user in a chat or thread: the user's current conversation and newest accepted message.

Revision: 0027, after 0026.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

readable_from = "0016"


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "chat_places",
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.user_id"), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("chat", sa.Text(), nullable=False),
        sa.Column("thread", sa.Text(), nullable=False, comment="'': none"),
        sa.Column("conversation", sa.Text(), comment="opened by a command; NULL: the place's own"),
        sa.Column("last_message_id", sa.Text(), comment="the newest message that was handled"),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "channel", "chat", "thread"),
        comment="Chats with the bot.",
    )
    op.create_index("chat_places_seen_idx", "chat_places", ["channel", "seen_at"])


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("chat_places")
