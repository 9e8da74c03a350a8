"""Deliveries store their user and scope, so that the deliveries of a conversation keep their order.

A conversation can have several sessions, and the order holds across these sessions. A delivery without a turn reports
that an application's message was refused.

Workers of earlier releases leave the two columns empty. A delivery with empty columns waits for earlier deliveries, but
later deliveries do not wait for it.

Revision: 0030, after 0029.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

readable_from = "0016"

_INDEX = "deliveries_pending_idx"
_REFUSED = "deliveries_refused_idx"
_RECEIVER = (
    "coalesce(target ->> 'url', target ->> 'task', "
    "(coalesce(target ->> 'channel', '') || ' ') || coalesce(target #>> '{place,chat}', ''))"
)


def upgrade() -> None:
    """Apply the migration."""
    op.execute("ALTER TABLE deliveries ADD COLUMN IF NOT EXISTS user_id text")
    op.execute("ALTER TABLE deliveries ADD COLUMN IF NOT EXISTS scope text")
    op.execute("COMMENT ON COLUMN deliveries.user_id IS 'the turn''s user; NULL: a release before 0030 wrote the row'")
    op.execute("COMMENT ON COLUMN deliveries.scope IS 'the scope of the turn''s session; NULL: it has no session'")
    op.execute("COMMENT ON COLUMN deliveries.turn_id IS 'in turns, or in unrouted if the message was refused'")
    op.execute("ALTER TABLE deliveries DROP CONSTRAINT IF EXISTS deliveries_turn_id_fkey")
    with op.get_context().autocommit_block():
        op.execute(
            """
            UPDATE deliveries AS d SET user_id = s.user_id, scope = s.scope
            FROM turns AS t JOIN sessions AS s USING (session_id)
            WHERE d.turn_id = t.turn_id AND d.status = 'pending' AND d.user_id IS NULL
            """
        )
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_INDEX}")
        op.create_index(
            _INDEX,
            "deliveries",
            ["user_id", "scope", sa.text(f"md5({_RECEIVER})"), "delivery_id"],
            postgresql_where=sa.text("status = 'pending'"),
            postgresql_concurrently=True,
        )
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_REFUSED}")
        op.create_index(
            _REFUSED,
            "deliveries",
            ["user_id"],
            postgresql_where=sa.text("scope IS NULL AND user_id IS NOT NULL"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_REFUSED}")
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_INDEX}")
    op.execute("DELETE FROM deliveries AS d WHERE NOT EXISTS (SELECT FROM turns AS t WHERE t.turn_id = d.turn_id)")
    op.execute("COMMENT ON COLUMN deliveries.turn_id IS NULL")
    op.execute(
        "ALTER TABLE deliveries ADD CONSTRAINT deliveries_turn_id_fkey FOREIGN KEY (turn_id) REFERENCES turns (turn_id)"
    )
    op.drop_column("deliveries", "scope")
    op.drop_column("deliveries", "user_id")
