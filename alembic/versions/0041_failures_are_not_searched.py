"""Replies of failed turns leave the search index and get no vector: they are errors, which only people read.

The trigger on `messages` runs at the end of the statement that settles the turn, so it sees the turn's new status.

Revision: 0041, after 0040.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

readable_from = "0016"

_SAID = """
    CREATE OR REPLACE FUNCTION perdure_said() RETURNS trigger LANGUAGE plpgsql AS
    $$
    BEGIN
        WITH said AS (
            SELECT m.session_id, m.seq, s.user_id, m.created_at, coalesce(m.author || ' ', '') || m.content AS content
            FROM added AS m JOIN sessions AS s USING (session_id)
            WHERE m.role IN ('user', 'assistant') AND m.content ~ '[^[:space:]]'
              AND (s.forked_from IS NULL OR m.created_at >= s.created_at){spoken}
        ), noted AS (
            INSERT INTO unembedded (kind, id, seq, user_id, due_at)
            SELECT 'message', session_id, seq, user_id, perdure_now() FROM said
        )
        INSERT INTO message_words (session_id, seq, user_id, occurred_at, words)
        SELECT session_id, seq, user_id, created_at,
               perdure_words(content) || array_to_tsvector(ARRAY[perdure_owner(user_id)])
        FROM said;
        RETURN NULL;
    END
    $$
"""
_SPOKEN = """
              AND NOT EXISTS (SELECT FROM turns AS f
                              WHERE f.turn_id = m.turn_id AND f.reply_seq = m.seq AND f.status = 'failed')"""

# Removes the replies of the next failed turns from the index; the vectors follow by their foreign key.
_FORGET = """
    WITH page AS (
        SELECT turn_id, session_id, reply_seq, status FROM turns
        WHERE error_code IS NOT NULL AND turn_id > :after ORDER BY turn_id LIMIT 1000
    ), unindexed AS (
        DELETE FROM message_words AS w USING page
        WHERE page.status = 'failed' AND w.session_id = page.session_id AND w.seq = page.reply_seq
    ), unnoted AS (
        DELETE FROM unembedded AS u USING page
        WHERE page.status = 'failed' AND u.kind = 'message' AND u.id = page.session_id AND u.seq = page.reply_seq
    )
    SELECT turn_id FROM page ORDER BY turn_id DESC LIMIT 1
"""


def upgrade() -> None:
    """Apply the migration."""
    _replace(_SPOKEN)
    with op.get_context().autocommit_block():
        after = "00000000-0000-0000-0000-000000000000"
        while (last := op.get_bind().execute(sa.text(_FORGET), {"after": after}).scalar()) is not None:
            after = str(last)


def downgrade() -> None:
    """Revert the migration. The rows that it removed from the index stay removed."""
    _replace("")


def _replace(spoken: str) -> None:
    op.execute(sa.text(_SAID.format(spoken=spoken).replace(":", "\\:")))
