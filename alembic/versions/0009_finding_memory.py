"""Indexes on unconsolidated and on imported sessions, and search data for messages that already exist.

The migration reads the whole tables of sessions and messages without blocking readers or writers. Each statement
commits separately. If the migration is interrupted, the next run repeats all statements.

Revision: 0009, after 0008.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_INDEXES = {
    "sessions_unconsolidated_idx": (["ended_at"], "ended_at IS NOT NULL AND consolidated_at IS NULL", False),
    "sessions_imported_as_key": (["user_id", "imported_as"], "imported_as IS NOT NULL", True),
}

# `_SESSIONS` returns the next 100 sessions. `_WORDS` writes the search data of their messages. For new messages, the
# trigger of 0008 writes this data.
_SESSIONS = "SELECT session_id FROM sessions WHERE session_id > :after ORDER BY session_id LIMIT 100"
_WORDS = """
    WITH said AS (
        SELECT m.session_id, m.seq, s.user_id, m.created_at, m.content
        FROM messages AS m JOIN sessions AS s USING (session_id)
        WHERE m.session_id = ANY (:session_ids)
          AND m.role IN ('user', 'assistant') AND m.content ~ '[^[:space:]]'
          AND (s.forked_from IS NULL OR m.created_at >= s.created_at)
    ), noted AS (
        INSERT INTO unembedded (kind, id, seq, user_id, due_at)
        SELECT 'message', session_id, seq, user_id, perdure_now() FROM said
        ON CONFLICT DO NOTHING
    )
    INSERT INTO message_words (session_id, seq, user_id, occurred_at, words)
    SELECT session_id, seq, user_id, created_at,
           perdure_words(content) || array_to_tsvector(ARRAY[perdure_owner(user_id)])
    FROM said
    ON CONFLICT DO NOTHING
"""


def upgrade() -> None:
    """Apply the migration."""
    downgrade()  # an interrupted build leaves an invalid index
    with op.get_context().autocommit_block():
        for name, (columns, condition, unique) in _INDEXES.items():
            op.create_index(
                name,
                "sessions",
                columns,
                unique=unique,
                postgresql_where=sa.text(condition),
                postgresql_concurrently=True,
            )
        _write_words()


def _write_words() -> None:
    connection = op.get_bind()
    after = "00000000-0000-0000-0000-000000000000"
    while found := connection.execute(sa.text(_SESSIONS), {"after": after}).scalars().all():
        connection.execute(sa.text(_WORDS), {"session_ids": found})
        after = str(found[-1])


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        for name in _INDEXES:
            op.drop_index(name, table_name="sessions", if_exists=True, postgresql_concurrently=True)
