"""The messages of a schedule that a message with `remember: false` has set are not remembered, either.

Revision: 0026, after 0025.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration. Messages of earlier schedules are remembered, as before."""
    op.add_column(
        "reminders",
        sa.Column(
            "remember",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("true"),
            comment="false: nothing is remembered",
        ),
        if_not_exists=True,
    )


def downgrade() -> None:
    """Revert the migration. The messages of all schedules are remembered."""
    op.drop_column("reminders", "remember", if_exists=True)
