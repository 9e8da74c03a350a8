"""What leaves a session's prompts has a running summary, and the sizes of models' windows are learned.

Revision: 0013, after 0012.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

readable_from = "0001"

_timestamp = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "running_summaries",
        sa.Column("session_id", sa.Uuid, sa.ForeignKey("sessions.session_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("from_seq", sa.BigInteger, nullable=False, comment="the first message that the summary covers"),
        sa.Column(
            "to_seq", sa.BigInteger, nullable=False, comment="the last message that has left the prompts; 0: none has"
        ),
        sa.Column("summary", sa.Text, nullable=False, comment="of the messages from from_seq to to_seq"),
        sa.Column("extractive", sa.Boolean, nullable=False, comment="a part of it is an extract, which no model wrote"),
        sa.Column("next_seq", sa.BigInteger, comment="the last message of those that leave the prompts next"),
        sa.Column("next_summary", sa.Text, comment="of the messages from from_seq to next_seq, made in the background"),
        sa.Column("attempts", sa.SmallInteger, nullable=False, server_default="0", comment="to make next_summary"),
        sa.Column("due_at", _timestamp, comment="when a worker makes next_summary; NULL: it is made, or abandoned"),
        comment="Layer 1: of each long session, the summary of what its prompts no longer show.",
    )
    op.create_index(
        "running_summaries_due_at_idx", "running_summaries", ["due_at"],
        postgresql_where=sa.text("due_at IS NOT NULL"),
    )  # fmt: skip
    op.create_table(
        "model_windows",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("tokens", sa.Integer, nullable=False, comment="an estimate: a prompt of this size was too long"),
        sa.Column("learned_at", _timestamp, nullable=False),
        comment="The windows of models, as far as a refused prompt has shown them.",
    )


def downgrade() -> None:
    """Revert the migration. Prompts then have the newest turns only."""
    op.drop_table("model_windows")
    op.drop_table("running_summaries")
