"""Users' schedules.

Revision: 0028, after 0027.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

readable_from = "0016"

_TIMESTAMP = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "reminders",
        sa.Column("schedule_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("cron", sa.Text(), nullable=True, comment="NULL: it fires once"),
        sa.Column("once", _TIMESTAMP, nullable=True, comment="the moment of a schedule that fires once"),
        sa.Column("timezone", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("conversation", sa.Text(), nullable=True),
        sa.Column("agent", sa.Text(), nullable=True),
        sa.Column("reply_to", postgresql.JSONB(), nullable=True),
        sa.Column("paused", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("next_due", _TIMESTAMP, nullable=True, comment="NULL: paused, or its only message was refused"),
        sa.Column("taken_until", _TIMESTAMP, nullable=True, comment="a worker fires it until then"),
        sa.Column("last_slot", _TIMESTAMP, nullable=True),
        sa.Column("last_turn_id", sa.Uuid(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True, comment="why its last message was refused"),
        sa.Column("created_at", _TIMESTAMP, nullable=False),
        sa.PrimaryKeyConstraint("schedule_id", name=op.f("reminders_pkey")),
        comment="Users' schedules. One that fires once is deleted when its message is accepted.",
    )
    op.create_index("reminders_user_id_idx", "reminders", ["user_id", "next_due"])
    op.create_index("reminders_next_due_idx", "reminders", ["next_due"])


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("reminders")
