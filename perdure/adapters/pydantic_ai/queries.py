"""The statements of the tool calls of adapted agents that native calls do not need, on the rows of `tool_effects`."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import HELD, RENEWED
from perdure.sessions.states import State, Trigger, sql

# Renews the lease of a session whose model has requested calls.
_REQUESTED = f"""
    fenced AS (
        UPDATE sessions
        SET lease_until = perdure_now() + make_interval(secs => %(lease_s)s),
            state = CASE WHEN state = '{State.THINKING}' THEN {sql(Trigger.TOOL_REQUESTED)} ELSE state END
        WHERE {HELD}
        RETURNING session_id
    )
""".strip()  # noqa: S608 (constants)

# Makes calls wait for a person. A call may have begun: its tool then asked for the approval, and did nothing else. Or
# the turn's user has approved it, and staff must.
ASK = Statement(
    "turns.ask_approval",
    f"""
    WITH {_REQUESTED}, asked AS (
        INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status, approver,
                                  intended_at, decide_at)
        SELECT e.effect_id, %(turn_id)s::uuid, %(message_seq)s, e.position, e.tool, e.arguments, e.effect, 'asked',
               e.approver, perdure_now(), perdure_now() + make_interval(secs => %(expires_s)s)
        FROM fenced, jsonb_to_recordset(%(calls)s::jsonb) AS e (
            effect_id uuid, position int, tool text, arguments text, effect text, approver text)
        ON CONFLICT (effect_id) DO UPDATE
        SET status = 'asked', approver = excluded.approver, intended_at = excluded.intended_at,
            decide_at = excluded.decide_at
        WHERE tool_effects.status IN ('intended', 'approved')
    )
    SELECT session_id FROM fenced
    """,  # noqa: S608 (constants)
)

# Makes a call wait for a client. It may have begun: its tool then deferred it, and `payload` has what the tool said.
DEFER = Statement(
    "turns.defer_call",
    f"""
    WITH fenced AS ({RENEWED}), deferred AS (
        INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status, waits_for,
                                  payload, intended_at, decide_at)
        SELECT e.effect_id, %(turn_id)s::uuid, %(message_seq)s, e.position, e.tool, e.arguments, e.effect, 'intended',
               'client', e.payload, perdure_now(), perdure_now() + make_interval(secs => %(expires_s)s)
        FROM fenced, jsonb_to_recordset(%(calls)s::jsonb) AS e (
            effect_id uuid, position int, tool text, arguments text, effect text, payload jsonb)
        ON CONFLICT (effect_id) DO UPDATE
        SET waits_for = 'client', payload = excluded.payload, intended_at = excluded.intended_at,
            decide_at = excluded.decide_at
        WHERE tool_effects.status = 'intended' AND tool_effects.finished_at IS NULL
    )
    SELECT session_id FROM fenced
    """,  # noqa: S608 (constants)
)

# Intends a call of which the reply was committed without an intent.
INTEND = Statement(
    "turns.intend_call",
    f"""
    WITH {_REQUESTED}, intended AS (
        INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,
                                  intended_at, decide_at)
        SELECT e.effect_id, %(turn_id)s::uuid, %(message_seq)s, e.position, e.tool, e.arguments, e.effect, 'intended',
               perdure_now(), perdure_now() + make_interval(secs => e.timeout_s)
        FROM fenced, jsonb_to_recordset(%(calls)s::jsonb) AS e (
            effect_id uuid, position int, tool text, arguments text, effect text, timeout_s double precision)
    )
    SELECT session_id FROM fenced
    """,  # noqa: S608 (constants)
)

# Begins a call again within its own tool, which a wrapper of the toolset repeats. The result of the last run counts.
REPEAT = Statement(
    "turns.repeat_effect",
    f"""
    WITH fenced AS ({RENEWED})
    UPDATE tool_effects
    SET status = 'intended', result = NULL, payload = NULL, finished_at = NULL, intended_at = perdure_now(),
        decide_at = perdure_now() + make_interval(secs => %(timeout_s)s)
    FROM fenced
    WHERE effect_id = %(effect_id)s
    RETURNING effect_id
    """,  # noqa: S608 (constants)
)
