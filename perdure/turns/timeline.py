"""A turn's timeline for the operator: what happened when, from the committed rows.

It has times, names and states, and no text of a user, a model or a tool, except for the errors of attempts.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import decider_of
from perdure.clock import iso
from perdure.database.engine import Executor, Statement
from perdure.errors import NotFound

MOST = 500
"""The most steps, and the most calls, that a timeline has: the first ones."""

TURN = Statement(
    "timeline.turn",
    """
    SELECT t.turn_id, t.session_id, t.user_id, t.agent, t.status, t.attempts, t.attempt_error, t.takeovers, t.channel,
           t.first_seq, t.reply_seq, t.error_code, t.accepted_at, t.started_at, t.settled_at, t.cancel_requested_at,
           t.fingerprint, perdure_now() AS now,
           (SELECT n.first_seq FROM turns AS n
            WHERE n.session_id = t.session_id AND n.seq > t.seq AND n.first_seq IS NOT NULL
            ORDER BY n.seq LIMIT 1) - 1 AS last_seq,
           CASE WHEN s.lease_until > perdure_now() AND t.status = 'running' THEN s.lease_owner END AS held_by
    FROM turns AS t JOIN sessions AS s USING (session_id) WHERE t.turn_id = %(turn_id)s
    """,
    writes=False,
)

# A turn's messages are a range: from its first message to its reply, or to the end of the transcript.
STEPS = Statement(
    "timeline.steps",
    """
    SELECT seq, model, fallback, token_count, usage, stop_reason, created_at,
           coalesce(jsonb_array_length(tool_calls), 0) AS calls
    FROM messages
    WHERE session_id = %(session_id)s AND seq >= %(first_seq)s AND seq <= %(last_seq)s AND role = 'assistant'
    ORDER BY seq LIMIT %(most)s
    """,
    writes=False,
)

CALLS = Statement(
    "timeline.calls",
    """
    SELECT effect_id, message_seq, position, tool, effect, status, intended_at, decide_at, finished_at, waits_for,
           sent_at, approver, decided_by, decided_at, parts IS NOT NULL AS is_list
    FROM tool_effects WHERE turn_id = %(turn_id)s ORDER BY message_seq, position LIMIT %(most)s
    """,
    writes=False,
)

DELIVERIES = Statement(
    "timeline.deliveries",
    """
    SELECT delivery_id, status, attempts, asking_seq IS NOT NULL AS asks, created_at, delivered_at, last_error
    FROM deliveries WHERE turn_id = %(turn_id)s ORDER BY delivery_id LIMIT %(most)s
    """,
    writes=False,
)

_LAST = 2**63 - 1


def read_timeline(executor: Executor, turn_id: UUID) -> dict[str, Any]:
    """When a turn was accepted, begun, taken over and settled, with its steps, calls and deliveries.

    Raises:
        NotFound: there is no such turn, or its message is not routed yet.
    """
    rows = executor.run(TURN, {"turn_id": turn_id})
    if not rows:
        raise NotFound("There is no such turn.")
    turn, given = rows[0], {"turn_id": turn_id, "most": MOST}
    last_seq = turn.reply_seq or turn.last_seq or _LAST
    of_turn = {"session_id": turn.session_id, "first_seq": turn.first_seq, "last_seq": last_seq}
    steps = [] if turn.first_seq is None else executor.run(STEPS, {**given, **of_turn})
    return {
        "turn_id": str(turn.turn_id),
        "session_id": str(turn.session_id),
        "agent": turn.agent,
        "fingerprint": turn.fingerprint,
        "channel": turn.channel,
        "status": turn.status,
        "attempts": turn.attempts,
        "attempt_error": turn.attempt_error,
        "error_code": turn.error_code,
        "held_by": turn.held_by,
        "accepted_at": iso(turn.accepted_at),
        "started_at": iso(turn.started_at),
        "cancel_requested_at": iso(turn.cancel_requested_at),
        "settled_at": iso(turn.settled_at),
        "now": iso(turn.now),
        "takeovers": turn.takeovers or [],
        "steps": [_step(number, row) for number, row in enumerate(steps, start=1)],
        "calls": [_call(row) for row in executor.run(CALLS, given)],
        "deliveries": [
            {
                "delivery_id": str(row.delivery_id),
                "status": row.status,
                "attempts": row.attempts,
                "asks": row.asks,
                "created_at": iso(row.created_at),
                "delivered_at": iso(row.delivered_at),
                "last_error": row.last_error,
            }
            for row in executor.run(DELIVERIES, given)
        ],
    }


def _step(number: int, row: Row[Any]) -> dict[str, Any]:
    return {
        "step": number,
        "seq": row.seq,
        "model": row.model,
        "fallback": bool(row.fallback),
        "usage": row.usage,
        "stop_reason": row.stop_reason,
        "calls": row.calls,
        "committed_at": iso(row.created_at),
    }


def _call(row: Row[Any]) -> dict[str, Any]:
    return {
        "call": str(row.effect_id),
        "seq": row.message_seq,
        "position": row.position,
        "tool": row.tool,
        "effect": row.effect,
        "status": row.status,
        "waits_for": row.waits_for,
        "is_list": row.is_list,
        "intended_at": iso(row.intended_at),
        "sent_at": iso(row.sent_at),
        "decide_at": iso(row.decide_at),
        "finished_at": iso(row.finished_at),
        "approver": row.approver,
        "decided_by": None if row.decided_by is None else decider_of(row.decided_by),
        "decided_at": iso(row.decided_at),
    }
