"""Snapshots: what an agent keeps between its steps and the transcript does not.

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
    """Go up."""
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
        sa.Column("tick", sa.BigInteger(), nullable=False, comment="the session's when this was last changed"),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="the fencing token it was written under"),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("snapshots_session_id_fkey")),
        sa.PrimaryKeyConstraint("session_id", "set_aside", name=op.f("snapshots_pkey")),
        postgresql_with={"fillfactor": "70"},
        comment="Working variables and pending events, changed along with a step.",
    )


def downgrade() -> None:
    """Go down."""
    op.drop_table("snapshots")
