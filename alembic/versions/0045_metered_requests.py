"""Requests that begin no turn and count as messages: side requests of chat front ends, and forks.

Revision: 0045, after 0043.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0045"
down_revision = "0043"
branch_labels = None
depends_on = None

readable_from = "0016"


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "metered_requests",
        sa.Column("request_id", sa.Uuid(), primary_key=True),
        sa.Column(
            "user_id", sa.Text(), nullable=False, comment="a user's key; the user may have no row, so no foreign key"
        ),
        sa.Column("kind", sa.Text(), nullable=False, comment="'side_request' or 'fork'"),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.Text(), comment="the model that answered a side request"),
        sa.Column("usage", JSONB(), comment="tokens of that answer"),
        comment="Requests that begin no turn and count as messages: side requests of chat front ends, and forks.",
        if_not_exists=True,  # a run that was interrupted in the block below has committed the table
    )
    op.create_index("metered_requests_user_idx", "metered_requests", ["user_id", "requested_at"], if_not_exists=True)
    op.create_index("metered_requests_requested_at_idx", "metered_requests", ["requested_at"], if_not_exists=True)
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")  # the build waits for older transactions, and blocks no others
        op.execute("DROP INDEX CONCURRENTLY IF EXISTS sessions_open_forks_idx")
        op.create_index(
            "sessions_open_forks_idx",
            "sessions",
            ["user_id"],
            postgresql_where=sa.text("forked_from IS NOT NULL AND ended_at IS NULL"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_index("sessions_open_forks_idx", "sessions")
    op.drop_table("metered_requests")
