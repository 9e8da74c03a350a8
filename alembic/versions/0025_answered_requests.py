"""Requests whose answers were sent completely.

If an identical request arrives later, the later request starts a new turn, unless the client marks it as a retry.

Revision: 0025, after 0024.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

readable_from = "0016"


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "answered_requests",
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.user_id"), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False, comment="of the conversation, the agent and the messages"),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("answered_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "fingerprint"),
        comment="The last turn whose answer was sent to the end, for requests without an idempotency key.",
    )
    op.create_index("answered_requests_answered_at_idx", "answered_requests", ["answered_at"])


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("answered_requests")
