"""A tool call may wait for another agent, which answers in a session of its own.

Revision: 0008, after 0007.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

readable_from = "0001"

_SCOPE = "'': all channels; else a channel, or '/' and a conversation's key"
_DEPTH = "0: a conversation of the user; else an agent's call opened it: the number of agents above it"

# What the agents say to each other is no message of the user, so it is neither searched nor embedded.
_SAID = """
    CREATE OR REPLACE FUNCTION perdure_said() RETURNS trigger LANGUAGE plpgsql AS
    $$
    BEGIN
        WITH said AS (
            SELECT m.session_id, m.seq, s.user_id, m.created_at, coalesce(m.author || ' ', '') || m.content AS content
            FROM added AS m JOIN sessions AS s USING (session_id)
            WHERE m.role IN ('user', 'assistant') AND m.content ~ '[^[:space:]]'{condition}
              AND (s.forked_from IS NULL OR m.created_at >= s.created_at)
              AND NOT EXISTS (SELECT FROM turns AS f
                              WHERE f.turn_id = m.turn_id AND f.reply_seq = m.seq AND f.status = 'failed')
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


def upgrade() -> None:
    """Apply the migration."""
    op.add_column(
        "sessions",
        sa.Column("depth", sa.SmallInteger, nullable=False, server_default="0", comment=_DEPTH),
        if_not_exists=True,
    )
    op.alter_column("sessions", "scope", comment=f"{_SCOPE}, or '>' and a call's id", existing_comment=_SCOPE)
    op.execute(_SAID.replace("{condition}", " AND s.depth = 0"))
    _accept("task", "timer", "client", "agent")


def downgrade() -> None:
    """Revert the migration. A call that waits for an agent then waits like a timer, until its time limit."""
    op.execute("UPDATE tool_effects SET waits_for = 'timer' WHERE waits_for = 'agent'")
    _accept("task", "timer", "client")
    op.execute(_SAID.replace("{condition}", ""))
    op.alter_column("sessions", "scope", comment=_SCOPE, existing_comment=f"{_SCOPE}, or '>' and a call's id")
    op.drop_column("sessions", "depth")


def _accept(*kinds: str) -> None:
    listed = ", ".join(f"'{kind}'" for kind in kinds)
    op.execute("ALTER TABLE tool_effects DROP CONSTRAINT tool_effects_waits_for_check")
    op.execute(
        "ALTER TABLE tool_effects ADD CONSTRAINT tool_effects_waits_for_check "
        f"CHECK (waits_for IN ({listed})) NOT VALID"
    )
    with op.get_context().autocommit_block():  # reads the table while others write to it
        op.execute("ALTER TABLE tool_effects VALIDATE CONSTRAINT tool_effects_waits_for_check")
