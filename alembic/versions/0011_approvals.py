"""Tool calls that wait for a person's approval, and sessions that no worker claims before a given time.

The state of an approval is a status of the tool call's row, so a new check constraint replaces the previous one. The
constraint applies to new rows at once. Existing rows are validated without blocking writers. The rate limit
counts a user's messages with a new index. The index is built concurrently.

Revision: 0011, after 0010.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_INDEX = "inbox_user_id_idx"
_CHECK = "tool_effects_status_check"
_BEFORE = ("intended", "done", "failed", "unknown")
_AFTER = ("asked", "approved", *_BEFORE, "denied")


def upgrade() -> None:
    """Apply the migration."""
    _drop_index()  # an interrupted build leaves an invalid index
    op.add_column(
        "sessions",
        sa.Column(
            "not_before",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="its turn waits until then, for a person or a model; NULL: for nobody",
        ),
        if_not_exists=True,
    )
    _allow(_AFTER)
    with op.get_context().autocommit_block():
        op.create_index(_INDEX, "inbox", ["user_id", "accepted_at"], postgresql_concurrently=True)


def downgrade() -> None:
    """Revert the migration. Marks tool calls with the status `asked`, `approved` or `denied` as failed."""
    _drop_index()
    op.execute("UPDATE tool_effects SET status = 'failed' WHERE status IN ('asked', 'approved', 'denied')")
    op.execute("UPDATE turns SET status = 'parked' WHERE status = 'waiting_approval'")
    op.execute("UPDATE sessions SET state = 'active' WHERE state = 'waiting_approval'")
    _allow(_BEFORE)
    op.drop_column("sessions", "not_before", if_exists=True)


def _drop_index() -> None:
    with op.get_context().autocommit_block():
        op.drop_index(_INDEX, table_name="inbox", if_exists=True, postgresql_concurrently=True)


def _allow(statuses: tuple[str, ...]) -> None:
    listed = ", ".join(f"'{status}'" for status in statuses)
    op.execute(f"ALTER TABLE tool_effects DROP CONSTRAINT IF EXISTS {_CHECK}")
    op.execute(f"ALTER TABLE tool_effects ADD CONSTRAINT {_CHECK} CHECK (status IN ({listed})) NOT VALID")
    with op.get_context().autocommit_block():
        op.execute(f"ALTER TABLE tool_effects VALIDATE CONSTRAINT {_CHECK}")
