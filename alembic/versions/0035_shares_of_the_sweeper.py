"""Columns in which a round of the sweeper leaves for the next one where it stopped, and how many turns a model takes.

`sweeps.after` is a place in the order in which the rounds visit users or receivers. `sweeps.paces` has the pace of the
turns that waited for a model, by model. `sessions.parked_for` names the model for which a session waits.

Revision: 0035, after 0033.
"""

from __future__ import annotations

from alembic import op

revision = "0035"
down_revision = "0033"
branch_labels = None
depends_on = None

readable_from = "0016"


def upgrade() -> None:
    """Apply the migration."""
    op.execute("ALTER TABLE sweeps ADD COLUMN IF NOT EXISTS after text")
    op.execute("ALTER TABLE sweeps ADD COLUMN IF NOT EXISTS paces jsonb")
    op.execute("ALTER TABLE sessions ADD COLUMN IF NOT EXISTS parked_for text")
    op.execute("COMMENT ON COLUMN sweeps.after IS 'where the last round stopped; NULL: it visited all'")
    op.execute("COMMENT ON COLUMN sweeps.paces IS 'by model: the turns that it takes at once, and those that it has'")
    op.execute("COMMENT ON COLUMN sessions.parked_for IS 'while paced is set: the model for which its turn waits'")


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("sessions", "parked_for")
    op.drop_column("sweeps", "paces")
    op.drop_column("sweeps", "after")
