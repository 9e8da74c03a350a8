"""Unrouted messages. Applications insert messages in their own transactions. Workers route the messages to sessions.

Revision: 0026, after 0025.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

readable_from = "0016"

_PENDING = sa.text("settled_at IS NULL")


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "unrouted",
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="order of insertion"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("message", postgresql.JSONB(), nullable=False, comment="the fields of POST /v1/messages"),
        sa.Column("accepted_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("routed_to", sa.Uuid(), nullable=True, comment="another message's turn that this message belongs to"),
        sa.Column("error_code", sa.Text(), nullable=True, comment="why it was refused"),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True, comment="when one of these was set"),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("unrouted_pkey")),
        comment="Messages of applications, inserted in their transactions. A routed one becomes a turn and is deleted.",
    )
    op.create_index("unrouted_due_at_idx", "unrouted", ["due_at", "position"], postgresql_where=_PENDING)
    op.create_index("unrouted_user_id_idx", "unrouted", ["user_id", "position"])
    op.create_index(
        "unrouted_settled_at_idx", "unrouted", ["settled_at"], postgresql_where=sa.text("settled_at IS NOT NULL")
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("unrouted")
