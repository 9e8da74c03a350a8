"""The statements of tool calls, of approvals and of calls that wait for a task, a client or a time."""

from __future__ import annotations

from perdure.access.tenants import OF_TENANT, WITHOUT_TENANT
from perdure.database.engine import Statement
from perdure.database.fencing import HELD
from perdure.sessions.states import State, Trigger, sql

# Records the result of one of several concurrent calls; `payload` is the result as an adapted agent returns it. Not
# fenced: a result may be recorded after the lease was lost. Only STEP, which is fenced, adds results to the transcript.
FINISH_EFFECT = Statement(
    "turns.finish_effect",
    """
    UPDATE tool_effects
    SET status = CASE WHEN status = 'intended' THEN %(status)s ELSE status END,
        result = %(result)s, payload = %(payload)s::jsonb, variables = %(variables)s::json,
        finished_at = perdure_now()
    WHERE effect_id = %(effect_id)s AND finished_at IS NULL
    """,
)

# Restarts a call's time limit, and renews the lease.
EXTEND_EFFECT = Statement(
    "turns.extend_effect",
    f"""
    WITH fenced AS (
        UPDATE sessions SET lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
        WHERE {HELD}
        RETURNING session_id
    )
    UPDATE tool_effects
    SET intended_at = perdure_now(), decide_at = perdure_now() + make_interval(secs => %(timeout_s)s)
    FROM fenced
    WHERE effect_id = %(effect_id)s
    RETURNING effect_id
    """,
)

# `undecided_s`: seconds until `decide_at`; at most the call's time limit, even if the clock was set back.
EFFECTS_OF_STEP = Statement(
    "turns.effects_of_step",
    """
    SELECT effect_id, position, arguments, effect, status, result, payload, variables, waits_for,
           sent_at IS NOT NULL AS sent, parts, approver,
           extract(epoch FROM least(decide_at - perdure_now(), decide_at - intended_at))::float AS undecided_s
    FROM tool_effects
    WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s
    ORDER BY position
    """,
    writes=False,
)

_UNDECIDED = """
    (end_requested_at IS NULL AND EXISTS (
        SELECT FROM tool_effects
        WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s AND status = 'asked'
          AND decide_at > perdure_now()))
""".strip()

# Begins the approved calls, unless a call can still be decided. Denies calls that can no longer be decided.
BEGIN_APPROVED = Statement(
    "turns.begin_approved",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = perdure_now() + make_interval(secs => %(lease_s)s),
            state = CASE WHEN state = '{State.THINKING}' THEN {sql(Trigger.TOOL_REQUESTED)}
                         WHEN state = '{State.WAITING_APPROVAL}' AND NOT {_UNDECIDED}
                         THEN {sql(Trigger.APPROVAL_DECIDED)}
                         ELSE state END
        WHERE {HELD}
        RETURNING end_requested_at, {_UNDECIDED} AS undecided
    ), denied AS (
        UPDATE tool_effects AS e
        SET status = 'denied', finished_at = perdure_now(),
            result = CASE WHEN fenced.end_requested_at IS NULL THEN %(expired)s ELSE %(ended)s END
        FROM fenced
        WHERE NOT fenced.undecided
          AND e.turn_id = %(turn_id)s AND e.message_seq = %(message_seq)s AND e.status = 'asked'
    ), begun AS (
        UPDATE tool_effects AS e
        SET status = 'intended', intended_at = perdure_now(),
            decide_at = perdure_now() + make_interval(secs => c.timeout_s)
        FROM fenced, jsonb_to_recordset(%(calls)s::jsonb) AS c (effect_id uuid, timeout_s double precision)
        WHERE NOT fenced.undecided AND e.effect_id = c.effect_id AND e.status = 'approved'
          AND e.turn_id = %(turn_id)s AND e.message_seq = %(message_seq)s
    )
    SELECT undecided FROM fenced
    """,
)

LOCK_OF_TURN = Statement(
    "turns.lock_of_turn",
    """
    SELECT s.session_id, s.end_requested_at IS NOT NULL AS ending FROM sessions AS s
    WHERE s.session_id = (SELECT session_id FROM turns WHERE turn_id = %(turn_id)s)
    FOR NO KEY UPDATE
    """,
)

# Call ids are distinct within a turn. In turns of older releases, ids may repeat; then the newest call is returned.
FIND_CALL = Statement(
    "turns.find_call",
    """
    SELECT e.effect_id, e.tool, e.arguments, e.status, e.waits_for, e.decide_at <= perdure_now() AS expired,
           coalesce(e.approver, 'user') AS approver, t.agent, t.priority, t.status = 'waiting_approval' AS waits
    FROM turns AS t
    JOIN tool_effects AS e ON e.turn_id = t.turn_id
    JOIN messages AS m ON m.session_id = t.session_id AND m.seq = e.message_seq
    WHERE t.turn_id = %(turn_id)s AND m.tool_calls -> e.position ->> 'id' = %(call_id)s
    ORDER BY e.message_seq DESC LIMIT 1
    """,
    writes=False,
)

# Records a decision. The last decision that the turn waits for makes the session claimable, and returns a row.
DECIDE = Statement(
    "turns.decide",
    f"""
    WITH decided AS (
        UPDATE tool_effects
        SET status = %(status)s, result = %(result)s, arguments = coalesce(%(arguments)s, arguments),
            decided_by = %(decided_by)s, decided_at = perdure_now()
        WHERE effect_id = %(effect_id)s
    )
    UPDATE sessions SET not_before = NULL, queued_at = NULL, woken_at = NULL, state = {sql(Trigger.APPROVAL_DECIDED)}
    WHERE session_id = %(session_id)s
      AND NOT EXISTS (SELECT FROM tool_effects
                      WHERE turn_id = %(turn_id)s AND status = 'asked' AND effect_id <> %(effect_id)s)
    RETURNING session_id
    """,
)

_WAITING = """
    SELECT e.effect_id, t.turn_id, t.session_id, t.user_id, t.agent, m.tool_calls -> e.position ->> 'id' AS call_id,
           e.tool, e.arguments, coalesce(e.approver, 'user') AS approver, e.intended_at AS waiting_since,
           e.decide_at AS expires_at
    FROM tool_effects AS e
    JOIN turns AS t ON t.turn_id = e.turn_id
    JOIN sessions AS s ON s.session_id = t.session_id
    JOIN messages AS m ON m.session_id = t.session_id AND m.seq = e.message_seq
    WHERE e.status = 'asked' AND t.status = 'waiting_approval' AND e.decide_at > perdure_now()
      AND s.end_requested_at IS NULL
""".strip()


def _waiting(name: str, condition: str) -> Statement:
    """A statement that lists the calls that wait for a decision, longest wait first (effect ids grow with time)."""
    page = "e.effect_id > %(after)s::uuid ORDER BY e.effect_id LIMIT %(limit)s"
    return Statement(f"turns.{name}", f"{_WAITING} AND {condition} AND {page}", writes=False)


WAITING = _waiting("waiting", "true")
WAITING_OF_TENANT = _waiting("waiting_of_tenant", OF_TENANT.format(column="t.user_id"))
WAITING_WITHOUT_TENANT = _waiting("waiting_without_tenant", WITHOUT_TENANT.format(column="t.user_id"))

# `s.unsettled > 0` and `t.settled_at IS NULL` let PostgreSQL find the calls by the user's unsettled turns.
WAITING_OF_USER = _waiting("waiting_of_user", "s.user_id = %(user_id)s AND s.unsettled > 0 AND t.settled_at IS NULL")

WAITING_OF_TURN = Statement("turns.waiting_of_turn", f"{_WAITING} AND t.turn_id = %(turn_id)s", writes=False)

# --- calls that wait for a task, a client or a time ----------------------------------------

# Results come from outside for these.
_AWAITED = "e.waits_for IN ('task', 'client')"

# Records that a task was, or may have been, sent. From then on, the sweeper probes the task (see PROBE_DUE).
NOTE_SENT = Statement(
    "turns.note_sent",
    """
    UPDATE tool_effects
    SET sent_at = coalesce(sent_at, perdure_now()), probe_at = perdure_now() + make_interval(secs => %(probe_s)s)
    WHERE effect_id = %(effect_id)s AND status = 'intended' AND finished_at IS NULL
    """,
)

IS_ENDING = Statement(
    "turns.is_ending",
    "SELECT end_requested_at IS NOT NULL AS ending FROM sessions WHERE session_id = %(session_id)s",
    writes=False,
)

# Locks the session of such a call. Accepting a message and parking or cancelling a turn take the same lock.
LOCK_OF_CALL = Statement(
    "turns.lock_of_call",
    f"""
    SELECT session_id FROM sessions
    WHERE session_id = (SELECT t.session_id FROM tool_effects AS e JOIN turns AS t USING (turn_id)
                        WHERE e.effect_id = %(effect_id)s AND {_AWAITED})
    FOR NO KEY UPDATE
    """,
)

# The row of such a call that has no result yet. Run after LOCK_OF_CALL, which may wait for the lock: if one
# statement did both, it would read the row as it was before the wait.
READ_CALL = Statement(
    "turns.read_call",
    f"""
    SELECT e.effect_id, t.session_id, t.turn_id, t.agent, t.priority, e.tool, e.arguments, e.parts,
           e.status = 'intended' AS waits,
           greatest(extract(epoch FROM e.decide_at - perdure_now())::float, 1) AS left_s
    FROM tool_effects AS e JOIN turns AS t USING (turn_id)
    WHERE e.effect_id = %(effect_id)s AND {_AWAITED} AND e.finished_at IS NULL
    """,
    writes=False,
)

# Records the result of such a call. A result that arrives after the turn stopped waiting changes no status and does not
# enter the transcript. `payload` had what the tool of an adapted agent said when it began to wait.
FINISH_TASK = Statement(
    "turns.finish_task",
    f"""
    UPDATE tool_effects AS e
    SET status = CASE WHEN status = 'intended' THEN %(status)s ELSE status END,
        result = %(result)s, finished_at = perdure_now(), probe_at = NULL, payload = NULL
    WHERE effect_id = %(effect_id)s AND {_AWAITED} AND finished_at IS NULL
    RETURNING effect_id
    """,
)

# Makes the session of a parked turn claimable if no call of the turn waits any more. `not_before` becomes the present
# time, not null, so that the claim does not count as an attempt (see CLAIM).
RESUME_PARKED = Statement(
    "turns.resume_parked",
    """
    UPDATE sessions AS s SET not_before = perdure_now(), woken_at = perdure_now(), wakes = 0
    FROM turns AS t
    WHERE s.session_id = %(session_id)s AND s.lease_until IS NULL AND s.not_before IS NOT NULL AND s.queued_at IS NULL
      AND t.turn_id = %(turn_id)s AND t.status = 'parked' AND t.settled_at IS NULL
      AND NOT EXISTS (SELECT FROM tool_effects
                      WHERE turn_id = %(turn_id)s AND status = 'intended' AND waits_for IS NOT NULL)
    RETURNING s.session_id
    """,
)

# Takes the calls whose tasks are due, longest due first. If a turn waits for a call, the call's tasks must be probed;
# otherwise they must be revoked. The pause until the next probe grows with the age of the call. If a `probe_at` is
# further in the future than the longest pause, the server's clock was ahead when it was written: it counts as past.
PROBE_DUE = Statement(
    "sweep.probe_due",
    """
    WITH due AS (
        (SELECT effect_id FROM tool_effects WHERE probe_at <= perdure_now()
         ORDER BY probe_at LIMIT (SELECT %(most)s::bigint))
        UNION ALL
        (SELECT effect_id FROM tool_effects WHERE probe_at > perdure_now() + interval '1 hour'
         ORDER BY probe_at LIMIT (SELECT %(most)s::bigint))
        LIMIT %(most)s
    ), locked AS (
        SELECT effect_id FROM tool_effects WHERE effect_id = ANY (ARRAY(SELECT effect_id FROM due))
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE tool_effects AS e
    SET probe_at = perdure_now() + make_interval(
            secs => least(greatest(extract(epoch FROM perdure_now() - e.intended_at) / 4, %(least_s)s), %(most_s)s))
    FROM locked WHERE e.effect_id = locked.effect_id
    RETURNING e.effect_id, e.status = 'intended' AS waits, e.progress, e.parts
    """,
)

# Records that the tasks of these calls are revoked, and need no further probe.
REVOKED = Statement(
    "sweep.revoked",
    """
    UPDATE tool_effects SET probe_at = NULL WHERE effect_id = ANY (%(effect_ids)s::uuid[]) AND status <> 'intended'
    """,
)

NOTE_PROGRESS = Statement(
    "turns.note_progress",
    "UPDATE tool_effects SET progress = %(progress)s WHERE effect_id = %(effect_id)s AND status = 'intended'",
)

# --- calls with a list of arguments --------------------------------------------------------

MAKE_PARTS = Statement(
    "turns.make_parts",
    """
    UPDATE tool_effects SET parts = %(parts)s::json
    WHERE effect_id = %(effect_id)s AND status = 'intended' AND parts IS NULL
    """,
)

SET_PARTS = Statement(
    "turns.set_parts",
    "UPDATE tool_effects SET parts = %(parts)s::json, progress = %(progress)s WHERE effect_id = %(effect_id)s",
)
