"""The table `erasures`: users who were erased and whose erasure needs a second pass.

The second pass is due one lease duration after the first pass deleted the user's rows.

Revision: 0010, after 0009.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "erasures",
        sa.Column("erasure_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False, comment="whose Redis keys are seen to once more"),
        sa.Column("session_ids", ARRAY(sa.Uuid()), nullable=False, comment="and of which sessions"),
        sa.Column("erased_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "due_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="when whoever was paused has lost its lease",
        ),
        sa.PrimaryKeyConstraint("erasure_id", name=op.f("erasures_pkey")),
        comment="Users who were erased less than a lease ago; the row goes with the last trace.",
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("erasures")
