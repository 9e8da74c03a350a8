"""A message may join the turn that runs, and a tool call may wait for the user.

Revision: 0009, after 0008.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column(
        "turns",
        sa.Column(
            "steers",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("false"),
            comment="until it begins: its message may join the turn that runs",
        ),
        if_not_exists=True,
    )
    _accept("task", "timer", "client", "agent", "user")


def downgrade() -> None:
    """Revert the migration. A call that waits for the user then waits for a client's result."""
    op.execute("UPDATE tool_effects SET waits_for = 'client' WHERE waits_for = 'user'")
    _accept("task", "timer", "client", "agent")
    op.drop_column("turns", "steers")


def _accept(*kinds: str) -> None:
    listed = ", ".join(f"'{kind}'" for kind in kinds)
    op.execute("ALTER TABLE tool_effects DROP CONSTRAINT tool_effects_waits_for_check")
    op.execute(
        "ALTER TABLE tool_effects ADD CONSTRAINT tool_effects_waits_for_check "
        f"CHECK (waits_for IN ({listed})) NOT VALID"
    )
    with op.get_context().autocommit_block():  # reads the table while others write to it
        op.execute("ALTER TABLE tool_effects VALIDATE CONSTRAINT tool_effects_waits_for_check")
