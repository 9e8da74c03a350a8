"""The SQL statements that flush working memory and read an ending session."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import HELD
from perdure.database.keyed import keyed

# Reads what `flush` needs to decide which turns may be written: the session's state, the turns that PostgreSQL has
# (`known`), and the turns with a message that is in the inbox (`accepted`). If PostgreSQL lacks a turn, but the inbox
# has a message of the turn, PostgreSQL lost the turn, and the sender then sent the message again.
COMPARE = Statement(
    "memory.compare",
    """
    SELECT (s.token, s.nonce) = (%(token)s, %(nonce)s) AND s.ended_at IS NULL AS current, s.unsettled,
           s.last_turn_seq, s.message_count,
           ARRAY(SELECT turn_id FROM turns WHERE turn_id = ANY (%(turn_ids)s::uuid[])) AS known,
           ARRAY(SELECT mine.turn_id
                 FROM unnest(%(of_turn)s::uuid[], %(channels)s::text[], %(message_ids)s::text[])
                      AS mine (turn_id, channel, message_id)
                 JOIN inbox AS i
                   ON i.user_id = s.user_id AND i.channel = mine.channel AND i.message_id = mine.message_id) AS accepted
    FROM sessions AS s WHERE s.session_id = %(session_id)s
    """,
    writes=False,
)

# Appends settled turns to a session. Writes nothing if the token is not current, if the session has ended, if it has an
# unsettled turn, or if a turn or message was added after `COMPARE` read the session. Only one of two concurrent flushes
# therefore writes.
FLUSH = Statement(
    "memory.flush",
    """
    WITH fenced AS (
        UPDATE sessions AS s
        SET last_turn_seq = s.last_turn_seq + %(turns_added)s,
            turn_count = s.turn_count + %(turns_added)s,
            message_count = s.message_count + %(messages_added)s,
            tick = s.tick + %(turns_added)s,
            last_activity_at = greatest(s.last_activity_at, %(last_at)s::timestamptz),
            channels = s.channels || ARRAY(
                SELECT DISTINCT used FROM unnest(%(channels)s::text[]) AS used WHERE used <> ALL (s.channels))
        WHERE s.session_id = %(session_id)s AND (s.token, s.nonce) = (%(token)s, %(nonce)s)
          AND s.ended_at IS NULL AND s.unsettled = 0
          AND s.last_turn_seq = %(last_turn_seq)s AND s.message_count = %(message_count)s
        RETURNING s.session_id, s.user_id, s.remember, s.tick - %(turns_added)s AS tick
    ), done AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, attempts, steps,
                           first_seq, reply_seq, error_code, error_message, usage, additions, accepted_at, settled_at,
                           settled_tick)
        SELECT t.turn_id, fenced.session_id, %(last_turn_seq)s + t.position, fenced.user_id, t.agent, t.channel,
               %(priority)s::smallint, t.status, 1, t.steps, %(message_count)s + t.first, %(message_count)s + t.reply,
               t.error_code, t.error_message, t.usage,
               CASE WHEN NOT t.remember OR NOT fenced.remember THEN '{"remember": false}'::jsonb END,
               t.accepted_at, t.settled_at, fenced.tick + t.position
        FROM fenced, jsonb_to_recordset(%(turns)s::jsonb) AS t (
            position int, turn_id uuid, agent text, channel text, status text, steps int, first int, reply int,
            error_code text, error_message text, usage jsonb, remember boolean, accepted_at timestamptz,
            settled_at timestamptz)
    ), said AS (
        INSERT INTO messages (session_id, seq, turn_id, role, content, tool_calls, tool_call_id, message_id, channel,
                              token_count, model, fallback, usage, stop_reason, opaque, parts, created_at)
        SELECT fenced.session_id, %(message_count)s + m.position, m.turn_id, m.role, m.content, m.tool_calls,
               m.tool_call_id, m.message_id, m.channel, m.token_count, m.model, m.fallback, m.usage, m.stop_reason,
               m.opaque, m.parts, m.created_at
        FROM fenced, jsonb_to_recordset(%(messages)s::jsonb) AS m (
            position int, turn_id uuid, role text, content text, tool_calls jsonb, tool_call_id text, message_id text,
            channel text, token_count int, model text, fallback boolean, usage jsonb, stop_reason text,
            opaque jsonb, parts jsonb, created_at timestamptz)
    ), input AS (
        -- Lets the inbox recognise the message if its sender repeats it.
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, parts, accepted_at)
        SELECT fenced.user_id, i.channel, i.message_id, i.turn_id, i.position, i.text, i.parts, i.accepted_at
        FROM fenced, jsonb_to_recordset(%(inputs)s::jsonb) AS i (
            channel text, message_id text, turn_id uuid, position int, text text, parts jsonb,
            accepted_at timestamptz)
        ON CONFLICT DO NOTHING
    )
    SELECT session_id FROM fenced
    """,
)

# The user and the channel of an ending session, and the time up to which its stream events are deleted.
ENDING_SESSION = Statement(
    "memory.ending",
    f"""
    SELECT user_id, nullif(scope, '') AS channel, end_requested_at, forked_from IS NOT NULL OR depth > 0 AS is_fork
    FROM sessions
    WHERE {HELD} AND {keyed("ended_at IS NULL AND end_requested_at IS NOT NULL")}
    """,  # noqa: S608 (constants)
    writes=False,
)
