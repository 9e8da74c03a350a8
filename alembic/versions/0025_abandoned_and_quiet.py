"""An index of abandoned deliveries by the time at which they were abandoned, and whether a drained worker is quiet.

The column `due_at` of a delivery has this time: the last attempt sets it, and nothing changes it while the delivery has
failed.

Revision: 0025, after 0024.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

readable_from = "0001"

_QUIET = "the intake is closed, and no turn runs here; NULL: a release before this column"

_NAME = "deliveries_abandoned_idx"

_INVALID = sa.text("SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(:name) AND NOT indisvalid")


def upgrade() -> None:
    """Apply the migration. It may be interrupted at any point, and run again."""
    op.add_column("processes", sa.Column("quiet", sa.Boolean, comment=_QUIET), if_not_exists=True)
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        if op.get_bind().execute(_INVALID, {"name": _NAME}).first() is not None:  # an interrupted build
            op.drop_index(_NAME, "deliveries", postgresql_concurrently=True)
        op.create_index(
            _NAME,
            "deliveries",
            ["due_at"],
            postgresql_where=sa.text("status = 'failed'"),
            postgresql_concurrently=True,
            if_not_exists=True,
        )


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index(_NAME, "deliveries", postgresql_concurrently=True, if_exists=True)
    op.drop_column("processes", "quiet", if_exists=True)
