"""A row that states which releases can use the schema, and two indexes on turns.

The indexes serve two lists, newest turn first: the turns of a user, and the turns that failed. The indexes are built
concurrently. Each statement commits separately. If the migration is interrupted, the next run repeats all statements.

Revision: 0014, after 0013.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

readable_from = "0013"

_INDEXES = {
    "turns_user_id_idx": (["user_id", "turn_id"], None),
    "turns_error_idx": (["turn_id"], sa.text("error_code IS NOT NULL")),
}


def upgrade() -> None:
    """Apply the migration."""
    downgrade()  # an interrupted build leaves an invalid index
    op.create_table(
        "schema_compatibility",
        sa.Column("single", sa.Boolean(), nullable=False),
        sa.Column(
            "readable_from",
            sa.Text(),
            nullable=False,
            comment="newest revision of the oldest release that can use it",
        ),
        sa.PrimaryKeyConstraint("single", name=op.f("schema_compatibility_pkey")),
        sa.CheckConstraint("single", name=op.f("schema_compatibility_single_check")),
        comment="Which releases can use the schema: one row, which every migration writes.",
    )
    with op.get_context().autocommit_block():
        for name, (columns, condition) in _INDEXES.items():
            op.create_index(name, "turns", columns, postgresql_where=condition, postgresql_concurrently=True)


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        for name in _INDEXES:
            op.drop_index(name, table_name="turns", if_exists=True, postgresql_concurrently=True)
    op.drop_table("schema_compatibility", if_exists=True)
