"""Turns of a tenant, a user or an agent can be paused.

Revision: 0014, after 0013.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "pauses",
        sa.Column("pause_id", sa.Uuid, primary_key=True),
        sa.Column("tenant", sa.Text, comment="NULL: any, or that of the user's key"),
        sa.Column("user_id", sa.Text, comment="a user's key; NULL: any"),
        sa.Column("agent", sa.Text, comment="NULL: any"),
        sa.Column("paused_at", sa.DateTime(timezone=True), nullable=False),
        comment="Whose turns do not begin: each row applies to the turns that match all its parts.",
    )
    op.execute("CREATE UNIQUE INDEX pauses_key ON pauses (tenant, user_id, agent) NULLS NOT DISTINCT")


def downgrade() -> None:
    """Revert the migration. What was paused runs."""
    op.drop_table("pauses")
