"""What turns cost is counted against budgets.

Revision: 0016, after 0015.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "turn_spendings",
        sa.Column("turn_id", sa.Uuid, primary_key=True),
        sa.Column("root_id", sa.Uuid, nullable=False, comment="the turn for which it works, or itself"),
        sa.Column("day", sa.Date, nullable=False, comment="that of the last model call"),
        sa.Column("earlier", sa.Numeric, nullable=False, comment="US dollars before this day"),
        sa.Column(
            "today", sa.Numeric, nullable=False, comment="US dollars on this day, with what is reserved for a call"
        ),
        sa.Column("total", sa.Numeric, nullable=False, comment="US dollars, with what is reserved for a call"),
        sa.ForeignKeyConstraint(
            ["turn_id"], ["turns.turn_id"], name="turn_spendings_turn_id_fkey", ondelete="CASCADE",
        ),
        comment="What turns cost, while a budget is set.",
    )  # fmt: skip
    op.create_index("turn_spendings_root_id_idx", "turn_spendings", ["root_id"])
    op.create_table(
        "day_spendings",
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False, comment="the user's key, or the tenant; empty: no tenant"),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("amount", sa.Numeric, nullable=False, comment="US dollars, with what is reserved for calls"),
        sa.CheckConstraint("kind IN ('user', 'tenant')", name=op.f("day_spendings_kind_check")),
        sa.PrimaryKeyConstraint("kind", "key", "day"),
        comment="What the turns of a user or a tenant cost in a day, while a budget is set.",
    )
    op.create_index("day_spendings_day_idx", "day_spendings", ["day"])


def downgrade() -> None:
    """Revert the migration. What was spent is computed from the replies (`perdure usage`)."""
    op.drop_table("day_spendings")
    op.drop_table("turn_spendings")
