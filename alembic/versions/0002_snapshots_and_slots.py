"""Snapshots, which hold a session's working variables and pending events, and the state of schedule entries.

A slot is a time at which a schedule entry is due. `schedule_entries` stores when an entry was first seen, and the lease
of the worker that processes a slot of the entry. `schedule_slots` gets columns for the number of attempts, the time of
the next attempt, and the error of the last failed attempt.

Revision: 0002, after 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "snapshots",
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column(
            "set_aside", sa.Boolean(), nullable=False, comment="could not be used; kept for the operator, read by none"
        ),
        sa.Column(
            "variables",
            postgresql.JSON(astext_type=sa.Text()),
            nullable=False,
            comment="as text, not jsonb: read back exactly as they were set",
        ),
        sa.Column(
            "events", postgresql.JSON(astext_type=sa.Text()), nullable=False, comment="[{source, type, payload}]"
        ),
        sa.Column("tick", sa.BigInteger(), nullable=False, comment="the session's that they are since"),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="the fencing token it was written under"),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("snapshots_session_id_fkey")),
        sa.PrimaryKeyConstraint("session_id", "set_aside", "tick", name=op.f("snapshots_pkey")),
        comment="Working variables and pending events: a row with each step that changed them.",
    )
    op.create_table(
        "schedule_entries",
        sa.Column("entry", sa.Text(), nullable=False),
        sa.Column(
            "since",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="first seen; no slot before this is caught up",
        ),
        sa.Column("token", sa.BigInteger(), server_default="0", nullable=False, comment="grows with each slot taken"),
        sa.Column(
            "lease_until",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="a slot is being worked on; NULL when none is",
        ),
        sa.Column("woken_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "wakes",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="firings by the sweeper since a slot was taken",
        ),
        sa.PrimaryKeyConstraint("entry", name=op.f("schedule_entries_pkey")),
        comment="The schedule's entries, each with the lease on the slot in work.",
        postgresql_with={"fillfactor": "70"},
    )
    op.add_column("schedule_slots", sa.Column("attempts", sa.Integer(), server_default="1", nullable=False))
    op.add_column(
        "schedule_slots",
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True, comment="not taken again before"),
    )
    op.add_column("schedule_slots", sa.Column("error", sa.Text(), nullable=True, comment="why the last attempt failed"))


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("schedule_slots", "error")
    op.drop_column("schedule_slots", "retry_at")
    op.drop_column("schedule_slots", "attempts")
    op.drop_table("schedule_entries")
    op.drop_table("snapshots")
