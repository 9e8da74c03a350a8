"""A turn keeps what its client adds to the agent, such as tools that the client runs.

Revision: 0012, after 0011.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

readable_from = "0001"

# The messages of a turn of which nothing may be remembered are neither searched nor embedded.
_SAID = """
    CREATE OR REPLACE FUNCTION perdure_said() RETURNS trigger LANGUAGE plpgsql AS
    $$
    BEGIN
        WITH said AS (
            SELECT m.session_id, m.seq, s.user_id, m.created_at, coalesce(m.author || ' ', '') || m.content AS content
            FROM added AS m JOIN sessions AS s USING (session_id)
            WHERE m.role IN ('user', 'assistant') AND m.content ~ '[^[:space:]]' AND s.depth = 0
              AND (s.forked_from IS NULL OR m.created_at >= s.created_at)
              AND NOT EXISTS (SELECT FROM turns AS f
                              WHERE f.turn_id = m.turn_id AND {excluded})
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
_FAILURE = "f.reply_seq = m.seq AND f.status = 'failed'"
_EXCLUDED = f"({_FAILURE} OR f.additions -> 'remember' = 'false')"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column(
        "turns",
        sa.Column(
            "additions", JSONB, comment="what its client adds to the agent: tools, settings, instructions, an output"
        ),
    )
    op.execute(_SAID.replace("{excluded}", _EXCLUDED))


def downgrade() -> None:
    """Revert the migration."""
    op.execute(_SAID.replace("{excluded}", _FAILURE))
    op.drop_column("turns", "additions")
