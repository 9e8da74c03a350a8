"""The SQL statements that the modules of all chat services share."""

from __future__ import annotations

from perdure.database.engine import Statement

# Changes the text of a message whose turn has not begun. The row lock waits for a concurrent claim of the turn.
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

# The unclaimed turn of a message, and the number of messages that the turn answers.
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

# The tool calls of a turn that needed a decision or still need one, newest first, and the chat of the turn.
CALLS = Statement(
    "chats.calls",
    """
    SELECT m.tool_calls -> e.position ->> 'id' AS call_id, e.tool, t.reply_to -> 'place' ->> 'chat' AS chat
    FROM turns AS t JOIN tool_effects AS e USING (turn_id)
    JOIN messages AS m ON m.session_id = t.session_id AND m.seq = e.message_seq
    WHERE t.turn_id = %(turn_id)s
    ORDER BY e.message_seq DESC, e.position
    """,
    writes=False,
)

# Whether a message with this id was accepted.
IS_USED = Statement(
    "chats.is_used",
    """
    SELECT EXISTS (SELECT FROM inbox WHERE user_id = %(user_id)s AND channel = %(channel)s
                   AND message_id = %(message_id)s) AS used
    """,
    writes=False,
)

# Whether the agent takes part in a conversation. If `conversation` is NULL: whether the user exists.
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

# Lets the group `to` have the user, and so the conversations, of the group `chat`. Does nothing if the user does not
# exist.
MOVE = Statement(
    "chats.move",
    """
    WITH moved AS (
        UPDATE chat_places AS p SET chat = %(to)s
        WHERE user_id = %(user_id)s AND channel = %(channel)s AND chat = %(chat)s
          AND NOT EXISTS (SELECT FROM chat_places AS n
                          WHERE n.user_id = p.user_id AND n.channel = p.channel AND n.chat = %(to)s
                            AND n.thread = p.thread)
    )
    INSERT INTO identities (tenant, channel, external_id, user_id, created_at)
    SELECT %(tenant)s, %(channel)s, %(external_id)s, user_id, perdure_now() FROM users WHERE user_id = %(user_id)s
    ON CONFLICT DO NOTHING
    """,
)

# The conversation that `/open` or `/new` chose for a place, which is a chat or a thread in a chat.
OPENED = Statement(
    "chats.opened",
    """
    SELECT conversation FROM chat_places
    WHERE user_id = %(user_id)s AND channel = %(channel)s AND chat = %(chat)s AND thread = %(thread)s
    """,
    writes=False,
)

# Sets the conversation of a place; NULL is the place's default conversation. Does nothing if the user does not exist.
OPEN = Statement(
    "chats.open",
    """
    INSERT INTO chat_places (user_id, channel, chat, thread, conversation, seen_at)
    SELECT user_id, %(channel)s, %(chat)s, %(thread)s, %(conversation)s::text, perdure_now()
    FROM users WHERE user_id = %(user_id)s
    ON CONFLICT (user_id, channel, chat, thread) DO UPDATE SET conversation = excluded.conversation
    RETURNING conversation
    """,
)

# Records the newest handled message of a place. Message ids are increasing numbers; an older message changes nothing.
SEE = Statement(
    "chats.see",
    """
    INSERT INTO chat_places AS p (user_id, channel, chat, thread, last_message_id, seen_at)
    SELECT user_id, %(channel)s, %(chat)s, %(thread)s, %(message_id)s, perdure_now()
    FROM users WHERE user_id = %(user_id)s
    ON CONFLICT (user_id, channel, chat, thread) DO UPDATE
    SET last_message_id = excluded.last_message_id, seen_at = excluded.seen_at
    WHERE p.last_message_id IS NULL OR p.last_message_id::numeric < excluded.last_message_id::numeric
    RETURNING last_message_id
    """,
)

# The recently active chats of a channel, with the newest handled message of each.
SEEN = Statement(
    "chats.seen",
    """
    SELECT chat, max(last_message_id::numeric)::text AS last_message_id FROM chat_places
    WHERE channel = %(channel)s AND last_message_id IS NOT NULL
      AND seen_at > perdure_now() - make_interval(secs => %(within_s)s)
    GROUP BY chat ORDER BY max(seen_at) DESC LIMIT %(most)s
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

# The unsettled ones among the turns of messages, with their status. `joined`: the message joined the turn of an earlier
# one. `awaited`: tool and stored progress of the tasks and agents for which the turn waits.
FOLLOWED = Statement(
    "chats.followed",
    """
    SELECT given AS turn_id, t.status, u.turn_id IS NOT NULL AS joined,
           CASE WHEN t.status = 'parked' THEN (
                SELECT jsonb_agg(jsonb_build_array(e.tool, e.progress) ORDER BY e.effect_id) FROM tool_effects AS e
                WHERE e.turn_id = t.turn_id AND e.status = 'intended' AND e.waits_for IN ('task', 'agent')
           ) END AS awaited
    FROM unnest(%(turn_ids)s::uuid[]) AS given
    LEFT JOIN unrouted AS u ON u.turn_id = given
    JOIN turns AS t ON t.turn_id = coalesce(u.routed_to, given)
    WHERE t.settled_at IS NULL
    """,
    writes=False,
)
