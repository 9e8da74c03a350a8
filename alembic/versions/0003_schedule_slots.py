"""The slot ledger: since when an entry exists, the lease on its slot in work, failed attempts.

Revision: 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go up."""
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
    """Go down."""
    op.drop_column("schedule_slots", "error")
    op.drop_column("schedule_slots", "retry_at")
    op.drop_column("schedule_slots", "attempts")
    op.drop_table("schedule_entries")
