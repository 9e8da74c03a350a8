"""A column for the reason why a model's reply is incomplete.

Revision: 0040, after 0037.
"""

from __future__ import annotations

from alembic import op

revision = "0040"
down_revision = "0037"
branch_labels = None
depends_on = None

readable_from = "0016"


def upgrade() -> None:
    """Apply the migration."""
    op.execute("ALTER TABLE messages ADD COLUMN IF NOT EXISTS stop_reason text")
    op.execute("COMMENT ON COLUMN messages.stop_reason IS 'why the model''s reply is incomplete, such as length'")


def downgrade() -> None:
    """Revert the migration."""
    op.execute("ALTER TABLE messages DROP COLUMN stop_reason")
