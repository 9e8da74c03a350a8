"""Who approves a waiting tool call, and who decided about it.

Earlier releases leave the columns empty: the user of the turn approves such a call.

Revision: 0043, after 0041.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0043"
down_revision = "0041"
branch_labels = None
depends_on = None

readable_from = "0016"

_ASKED = "tool_effects_asked_idx"
_DECIDED_BY = "tool_effects_decided_by_idx"


def upgrade() -> None:
    """Apply the migration."""
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS approver text")
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS decided_by text")
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS decided_at timestamptz")
    op.execute("COMMENT ON COLUMN tool_effects.approver IS 'who approves it: user or staff; NULL: user'")
    op.execute("COMMENT ON COLUMN tool_effects.decided_by IS 'who approved or denied it, such as user:KEY'")
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")  # the builds wait for older transactions, and block no others
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_ASKED}")
        op.create_index(
            _ASKED,
            "tool_effects",
            ["effect_id"],
            postgresql_where=sa.text("status = 'asked'"),
            postgresql_concurrently=True,
        )
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_DECIDED_BY}")
        op.create_index(
            _DECIDED_BY,
            "tool_effects",
            ["decided_by"],
            postgresql_where=sa.text("decided_by IS NOT NULL"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    """Revert the migration. The user of the turn then approves every waiting call."""
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_DECIDED_BY}")
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_ASKED}")
    for column in ("decided_at", "decided_by", "approver"):
        op.drop_column("tool_effects", column)
