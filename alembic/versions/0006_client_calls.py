"""A tool call may wait for a client.

Revision: 0006, after 0005.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    _accept("task", "timer", "client")


def downgrade() -> None:
    """Revert the migration. A call that waits for a client then waits like a timer, until its time limit."""
    op.execute("UPDATE tool_effects SET waits_for = 'timer' WHERE waits_for = 'client'")
    _accept("task", "timer")


def _accept(*kinds: str) -> None:
    listed = ", ".join(f"'{kind}'" for kind in kinds)
    op.execute("ALTER TABLE tool_effects DROP CONSTRAINT tool_effects_waits_for_check")
    op.execute(
        "ALTER TABLE tool_effects ADD CONSTRAINT tool_effects_waits_for_check "
        f"CHECK (waits_for IN ({listed})) NOT VALID"
    )
    with op.get_context().autocommit_block():  # reads the table while others write to it
        op.execute("ALTER TABLE tool_effects VALIDATE CONSTRAINT tool_effects_waits_for_check")
