"""The statements of streaming."""

from __future__ import annotations

from perdure.database.engine import Statement

# A turn's messages begin at `first_seq` and end before the next turn's. One row without a message reports the total if
# no message is left.
MESSAGES_OF_TURN = Statement(
    "events.messages_of_turn",
    """
    WITH own AS (
        SELECT m.*, row_number() OVER (ORDER BY m.seq) AS number
        FROM turns AS t JOIN messages AS m ON m.session_id = t.session_id
        WHERE t.turn_id = %(turn_id)s AND m.turn_id = t.turn_id AND m.seq >= t.first_seq
          AND m.seq < coalesce((SELECT n.first_seq FROM turns AS n
                                WHERE n.session_id = t.session_id AND n.seq > t.seq AND n.first_seq IS NOT NULL
                                ORDER BY n.seq LIMIT 1), 9223372036854775807)
    )
    SELECT (SELECT count(*) FROM own) AS total, own.seq, own.turn_id, own.role, own.content, own.tool_calls,
           own.tool_call_id, own.channel, own.token_count, own.model, own.fallback, own.created_at
    FROM (VALUES (1)) AS one LEFT JOIN own ON own.number > %(after)s
    ORDER BY own.seq
    """,
    writes=False,
)

STATES = Statement(
    "events.states",
    """
    SELECT t.turn_id, t.status, s.tick, s.not_before
    FROM turns AS t JOIN sessions AS s USING (session_id)
    WHERE t.turn_id = ANY (%(turn_ids)s::uuid[])
    """,
    writes=False,
)
