"""Memories have a subject and an attribute, may be corrected and forgotten, and a conversation may be left out of them.

Revision: 0015, after 0014.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

readable_from = "0001"

_timestamp = sa.DateTime(timezone=True)
_SAID = "when the user said it"
_HOLDS = "when the user said it, or since when it holds"


def upgrade() -> None:
    """Apply the migration."""
    op.alter_column("memories", "valid_from", comment=_HOLDS, existing_comment=_SAID)
    op.add_column(
        "memories",
        sa.Column("subject", sa.Text, comment="whom it is about: user, a relative, a name"),
        if_not_exists=True,
    )
    op.add_column(
        "memories",
        sa.Column("attribute", sa.Text, comment="what of the subject, such as home or allergy"),
        if_not_exists=True,
    )
    op.add_column(
        "conversations",
        sa.Column(
            "remember",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("true"),
            comment="false: nothing is remembered",
        ),
        if_not_exists=True,
    )
    op.add_column(
        "sessions",
        sa.Column(
            "remember",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("true"),
            comment="false: nothing of new turns is remembered",
        ),
        if_not_exists=True,
    )
    op.create_table(
        "forgotten_messages",
        sa.Column("session_id", sa.Uuid, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("forgotten_at", _timestamp, nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id", "seq"], ["messages.session_id", "messages.seq"],
            name="forgotten_messages_session_id_seq_fkey", ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("session_id", "seq"),
        comment="The messages of forgotten memories, from which no memory is extracted again.",
        if_not_exists=True,
    )  # fmt: skip
    _accept("consolidation", "tool", "user")


def downgrade() -> None:
    """Revert the migration. A user's corrections stay, as if a tool had written them."""
    op.execute("UPDATE memories SET origin = 'tool' WHERE origin = 'user'")
    _accept("consolidation", "tool")
    op.drop_table("forgotten_messages")
    op.drop_column("sessions", "remember")
    op.drop_column("conversations", "remember")
    op.drop_column("memories", "attribute")
    op.drop_column("memories", "subject")
    op.alter_column("memories", "valid_from", comment=_SAID, existing_comment=_HOLDS)


def _accept(*origins: str) -> None:
    listed = ", ".join(f"'{origin}'" for origin in origins)
    op.execute("ALTER TABLE memories DROP CONSTRAINT memories_origin_check")
    op.execute(f"ALTER TABLE memories ADD CONSTRAINT memories_origin_check CHECK (origin IN ({listed})) NOT VALID")
    with op.get_context().autocommit_block():  # reads the table while others write to it
        op.execute("ALTER TABLE memories VALIDATE CONSTRAINT memories_origin_check")
