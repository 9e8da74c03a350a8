"""Workers and beats report that they run, and failed deliveries have an index.

Revision: 0011, after 0010.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index("deliveries_failed_idx", "deliveries", postgresql_concurrently=True, if_exists=True)
        op.create_index(
            "deliveries_failed_idx",
            "deliveries",
            ["created_at"],
            postgresql_where=sa.text("status = 'failed'"),
            postgresql_concurrently=True,
        )
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "processes",
        sa.Column("process_id", sa.Uuid, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False, comment="as in the leases of sessions"),
        sa.Column("release", sa.Text, nullable=False),
        sa.Column("queues", ARRAY(sa.Text), nullable=False),
        sa.Column("started_at", moment, nullable=False),
        sa.Column("seen_at", moment, nullable=False),
        sa.Column("stopped_at", moment),
        sa.Column("skew_s", sa.Double, nullable=False, comment="how far its clock is ahead of the database's"),
        sa.PrimaryKeyConstraint("process_id"),
        sa.CheckConstraint("kind IN ('worker', 'beat')", name=op.f("processes_kind_check")),
        comment="Workers and beats, each with its last report.",
        postgresql_with={"fillfactor": "70"},
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("processes", if_exists=True)
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index("deliveries_failed_idx", "deliveries", postgresql_concurrently=True, if_exists=True)
