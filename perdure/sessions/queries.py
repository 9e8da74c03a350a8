"""The statements that find, open and read sessions."""

from __future__ import annotations

from perdure.database.engine import Statement

# Opens the live session of a scope. A session opened by somebody else meanwhile is as good:
# then nothing is inserted.
OPEN = Statement(
    "sessions.open",
    """
    WITH known AS (
        INSERT INTO users (user_id, created_at) VALUES (%(user_id)s, perdure_now())
        ON CONFLICT DO NOTHING
    )
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels)
    VALUES (%(session_id)s, %(user_id)s, %(scope)s, true, %(agent)s, 'initializing', perdure_now(), perdure_now(),
            ARRAY[%(channel)s])
    ON CONFLICT (user_id, scope) WHERE routable DO NOTHING
    """,
)

# The session that a message is for, locked until the transaction ends.
LOCK_TARGET = Statement(
    "sessions.lock_target",
    """
    SELECT session_id, state, unsettled
    FROM sessions
    WHERE user_id = %(user_id)s
      AND CASE WHEN %(session_id)s::uuid IS NULL THEN scope = %(scope)s AND routable
               ELSE session_id = %(session_id)s::uuid END
    FOR NO KEY UPDATE
    """,
)

_SESSION = """
    SELECT session_id, user_id, agent, state, turn_count, message_count, created_at, last_activity_at, ended_at,
           channels, summary, key_topics
    FROM sessions
"""

LIST = Statement(
    "sessions.list",
    _SESSION
    + """
    WHERE %(user_id)s::text IS NULL OR user_id = %(user_id)s
    ORDER BY created_at DESC, session_id DESC LIMIT %(limit)s
    """,
    writes=False,
)

READ = Statement("sessions.read", _SESSION + " WHERE session_id = %(session_id)s", writes=False)

MESSAGES = Statement(
    "sessions.messages",
    """
    SELECT seq, turn_id, role, content, tool_calls, tool_call_id, message_id, channel, token_count, model, fallback,
           created_at
    FROM messages
    WHERE session_id = %(session_id)s AND seq > %(after)s
    ORDER BY seq LIMIT %(limit)s
    """,
    writes=False,
)
