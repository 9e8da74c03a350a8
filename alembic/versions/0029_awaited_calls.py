"""Tool calls that wait for a Celery task or until a given time.

While a turn waits for such a call, the turn holds no lease. `probe_at` is the time at which the sweeper next queries
the result backend for the state of the call's task.

Earlier releases do not read or write the new columns. They treat a waiting call as an interrupted call. Do not give an
agent tools with waiting calls before all workers run this release.

Revision: 0029, after 0028.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

readable_from = "0016"

_INDEX = "tool_effects_probe_idx"
_CHECK = "tool_effects_waits_for_check"


def upgrade() -> None:
    """Apply the migration."""
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS waits_for text")
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS sent_at timestamptz")
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS probe_at timestamptz")
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS progress text")
    op.execute("ALTER TABLE tool_effects ADD COLUMN IF NOT EXISTS parts json")
    op.execute("COMMENT ON COLUMN tool_effects.waits_for IS 'whose result it waits for, without a worker'")
    op.execute("COMMENT ON COLUMN tool_effects.sent_at IS 'since when its task is, or may be, sent'")
    op.execute("COMMENT ON COLUMN tool_effects.probe_at IS 'when the sweeper asks about its task, or revokes it'")
    op.execute("COMMENT ON COLUMN tool_effects.progress IS 'what its task last reported, as JSON'")
    op.execute("COMMENT ON COLUMN tool_effects.parts IS '[[status, result]], of a call with a list of arguments'")
    op.execute(f"ALTER TABLE tool_effects DROP CONSTRAINT IF EXISTS {_CHECK}")
    op.execute(f"ALTER TABLE tool_effects ADD CONSTRAINT {_CHECK} CHECK (waits_for IN ('task', 'timer')) NOT VALID")
    with op.get_context().autocommit_block():
        op.execute(f"ALTER TABLE tool_effects VALIDATE CONSTRAINT {_CHECK}")
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_INDEX}")
        op.create_index(
            _INDEX,
            "tool_effects",
            ["probe_at"],
            postgresql_where=sa.text("probe_at IS NOT NULL"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    """Revert the migration. A waiting call becomes an interrupted call, whose outcome is unknown."""
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_INDEX}")
    op.execute(f"ALTER TABLE tool_effects DROP CONSTRAINT {_CHECK}")
    for column in ("parts", "progress", "probe_at", "sent_at", "waits_for"):
        op.drop_column("tool_effects", column)
