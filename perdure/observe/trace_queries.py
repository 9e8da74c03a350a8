"""The statements that read a settled turn, and a delivery's turn, for their traces."""

from __future__ import annotations

from perdure.database.engine import Statement

TURN = Statement(
    "observe.traced_turn",
    """
    SELECT session_id, agent, channel, status, attempts, steps, error_code, usage, traceparent, first_seq,
           accepted_at, started_at, settled_at
    FROM turns WHERE turn_id = %(turn_id)s AND settled_at IS NOT NULL
    """,
    writes=False,
)

# The texts are read only if they are to be exported.
MESSAGES = Statement(
    "observe.traced_messages",
    """
    SELECT seq, role, model, usage, fallback, stop_reason, created_at, prompt ->> 'model' AS asked,
           tool_calls IS NOT NULL AS has_calls,
           CASE WHEN %(texts)s THEN content END AS content, CASE WHEN %(texts)s THEN tool_calls END AS tool_calls,
           CASE WHEN %(texts)s THEN tool_call_id END AS tool_call_id
    FROM messages
    WHERE session_id = %(session_id)s AND turn_id = %(turn_id)s AND seq >= %(first_seq)s
    ORDER BY seq
    """,
    writes=False,
)

EFFECTS = Statement(
    "observe.traced_effects",
    """
    SELECT effect_id, message_seq, position, tool, effect, status, waits_for, intended_at, finished_at,
           CASE WHEN %(texts)s THEN arguments END AS arguments
    FROM tool_effects WHERE turn_id = %(turn_id)s ORDER BY message_seq, position
    """,
    writes=False,
)

DELIVERY = Statement(
    "observe.traced_delivery",
    """
    SELECT d.turn_id, t.traceparent, d.attempts FROM deliveries AS d JOIN turns AS t USING (turn_id)
    WHERE d.delivery_id = %(delivery_id)s
    """,
    writes=False,
)
