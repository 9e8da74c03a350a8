"""Columns for the Celery tasks for which an erased user's turns waited. The sweeper revokes these tasks.

Revision: 0032, after 0031.
"""

from __future__ import annotations

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

readable_from = "0016"


def upgrade() -> None:
    """Apply the migration."""
    op.execute("ALTER TABLE erasures ADD COLUMN IF NOT EXISTS task_ids uuid[] NOT NULL DEFAULT '{}'")
    op.execute("ALTER TABLE erasures ADD COLUMN IF NOT EXISTS revoked_at timestamptz")
    op.execute("COMMENT ON COLUMN erasures.task_ids IS 'tasks of Celery tools that may be queued'")
    op.execute("COMMENT ON COLUMN erasures.revoked_at IS 'when they were first revoked; they are again at due_at'")


def downgrade() -> None:
    """Revert the migration."""
    op.execute("ALTER TABLE erasures DROP COLUMN revoked_at, DROP COLUMN task_ids")
