"""The table `intake`: one row, which states whether workers start turns. `perdure drain` closes and opens the intake.

Revision: 0006, after 0005.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "intake",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "closed_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="since when the fleet takes nothing in; NULL while it does",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("intake_pkey")),
        comment="Whether the fleet takes in work: one row, which a drain closes.",
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("intake")
