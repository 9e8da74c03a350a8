"""The statements of edits, deletions and known conversations of chats."""

from __future__ import annotations

from perdure.database.engine import Statement

# Changes the text of a message whose turn has not begun. The lock on the turn waits for a claim of it.
EDIT = Statement(
    "chats.edit",
    """
    WITH waiting AS (
        SELECT t.turn_id FROM inbox AS i JOIN turns AS t USING (turn_id)
        WHERE i.user_id = %(user_id)s AND i.channel = %(channel)s AND i.message_id = %(message_id)s
          AND t.status = 'accepted'
        FOR NO KEY UPDATE OF t
    )
    UPDATE inbox SET text = %(text)s FROM waiting
    WHERE user_id = %(user_id)s AND channel = %(channel)s AND message_id = %(message_id)s
    RETURNING inbox.turn_id
    """,
)

# The turn of a message that has not begun, and the number of the messages that it answers.
WAITING = Statement(
    "chats.waiting",
    """
    SELECT t.turn_id, (SELECT count(*) FROM inbox WHERE turn_id = t.turn_id) AS messages
    FROM inbox AS i JOIN turns AS t USING (turn_id)
    WHERE i.user_id = %(user_id)s AND i.channel = %(channel)s AND i.message_id = %(message_id)s
      AND t.status = 'accepted'
    """,
    writes=False,
)

# Whether the agent takes part in a conversation; without a key, whether the user exists.
IS_KNOWN = Statement(
    "chats.is_known",
    """
    SELECT CASE WHEN %(conversation)s::text IS NULL
                THEN EXISTS (SELECT FROM users WHERE user_id = %(user_id)s)
                ELSE EXISTS (SELECT FROM conversations
                             WHERE user_id = %(user_id)s AND conversation = %(conversation)s) END AS known
    """,
    writes=False,
)

# The unsettled turns of a session, oldest first.
UNSETTLED = Statement(
    "chats.unsettled",
    """
    SELECT turn_id FROM turns WHERE session_id = %(session_id)s AND settled_at IS NULL ORDER BY seq LIMIT 100
    """,
    writes=False,
)

# The unsettled ones of these turns.
RUNNING = Statement(
    "chats.running",
    "SELECT turn_id, status FROM turns WHERE turn_id = ANY(%(turn_ids)s::uuid[]) AND settled_at IS NULL",
    writes=False,
)

# A lock of the connection: held until UNLOCK or the connection's end.
LOCK = Statement(
    "chats.lock",
    "SELECT pg_try_advisory_lock(hashtextextended('perdure channel ' || %(name)s::text, 0)) AS locked",
)

UNLOCK = Statement(
    "chats.unlock",
    "SELECT pg_advisory_unlock(hashtextextended('perdure channel ' || %(name)s::text, 0)) AS unlocked",
)
