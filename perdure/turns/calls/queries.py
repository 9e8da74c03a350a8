"""The statements of tool calls, of approvals and of calls that wait for a task, a client, an agent or a time."""

from __future__ import annotations

from perdure.access.tenants import OF_TENANT, WITHOUT_TENANT
from perdure.database.engine import Statement
from perdure.database.fencing import HELD, RENEWED
from perdure.database.keyed import keyed
from perdure.sessions.states import State, Trigger, sql


def sum_of(count: str) -> str:
    """The sum of one count of the messages' usage; NULL if no message reports it."""
    number = f"CASE jsonb_typeof(usage -> '{count}') WHEN 'number' THEN (usage ->> '{count}')::numeric END"
    return f"sum({number})::bigint"


def each_row(table: str, condition: str, alias: str) -> str:
    """A join with the rows of `table`, which PostgreSQL looks up by index for each row before.

    It takes the rows of a recursive CTE to be many, and would read the whole table.
    """
    return f"CROSS JOIN LATERAL (SELECT * FROM {table} WHERE {condition} OFFSET 0) AS {alias}"


def _goes_on(turn_id: str) -> str:
    """Whether neither the cancellation of a turn nor the end of its session is requested.

    A worker may run the turn until much later, for example while a tool runs. It begins nothing with answers then.
    """
    return f"""
        EXISTS (SELECT FROM turns AS g JOIN sessions AS o USING (session_id)
                WHERE g.turn_id = {turn_id} AND g.cancel_requested_at IS NULL AND o.end_requested_at IS NULL)
    """.strip()


def below(turn_id: str, *, all_calls: bool = False) -> str:
    """A query for a turn, and those of other agents that answer its open calls, directly or for one another.

    A call is open while the turn that made it, and the one that answers it, go on. With `all_calls`, also those that
    answer other calls of it: `is_open` tells which. `until` is the time at which the first of the calls between a turn
    and the uppermost one is due; NULL for the uppermost.
    """
    is_open = f"below.is_open AND d.status = 'intended' AND d.decide_at > perdure_now() AND {_goes_on('d.effect_id')}"
    return f"""
        WITH RECURSIVE below (turn_id, until, is_open) AS (
            SELECT {turn_id}, NULL::timestamptz, {_goes_on(turn_id)}
            UNION ALL
            SELECT d.effect_id, least(below.until, d.decide_at), {is_open}
            FROM below {each_row("tool_effects", "turn_id = below.turn_id", "d")}
            WHERE d.waits_for = 'agent' {"" if all_calls else f"AND {is_open}"}
        )
        SELECT turn_id, until, is_open FROM below
    """.strip()


_TOKENS = f"""
    'input_tokens', coalesce({sum_of("input_tokens")}, 0), 'output_tokens', coalesce({sum_of("output_tokens")}, 0),
    'cached_tokens', {sum_of("cached_tokens")}, 'reasoning_tokens', {sum_of("reasoning_tokens")}
""".strip()


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
    WITH fenced AS ({RENEWED})
    UPDATE tool_effects
    SET intended_at = perdure_now(), decide_at = perdure_now() + make_interval(secs => %(timeout_s)s)
    FROM fenced
    WHERE effect_id = %(effect_id)s
    RETURNING effect_id
    """,
)

# Replaces a call's arguments by those that a hook made of them, before the call begins.
CHANGE_ARGUMENTS = Statement(
    "turns.change_arguments",
    f"""
    UPDATE tool_effects SET arguments = %(arguments)s
    WHERE effect_id = %(effect_id)s AND finished_at IS NULL AND EXISTS (SELECT FROM sessions WHERE {HELD})
    RETURNING effect_id
    """,
)

# `undecided_s`: seconds until `decide_at`; at most the call's time limit, even if the clock was set back. `used`: the
# tokens that another agent has used for its answer so far, or guards for the refused answers to a question.
EFFECTS_OF_STEP = Statement(
    "turns.effects_of_step",
    f"""
    SELECT effect_id, position, arguments, effect, status, result, payload, variables, waits_for,
           sent_at IS NOT NULL AS sent, parts, approver,
           CASE WHEN waits_for = 'agent' THEN (
                SELECT jsonb_build_object({_TOKENS}) FROM messages
                WHERE session_id = effect_id AND usage IS NOT NULL HAVING count(*) > 0)
                WHEN waits_for = 'user' THEN payload -> 'used' END AS used,
           extract(epoch FROM least(decide_at - perdure_now(), decide_at - intended_at))::float AS undecided_s
    FROM tool_effects
    WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s
    ORDER BY position
    """,
    writes=False,
)

_UNDECIDED = f"""
    (end_requested_at IS NULL AND EXISTS (
        SELECT FROM tool_effects
        WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s AND {keyed("status = 'asked'")}
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
          AND e.turn_id = %(turn_id)s AND e.message_seq = %(message_seq)s AND {keyed("e.status = 'asked'")}
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

# Whether the turn `t` answers a call for which no turn waits any more, directly or for other agents. The next probe
# cancels it.
_UNWANTED = f"""
    EXISTS (
        WITH RECURSIVE above (turn_id, waits) AS (
            SELECT t.turn_id, true
            UNION ALL
            SELECT a.turn_id, a.status = 'intended' AND a.decide_at > perdure_now() AND {_goes_on("a.turn_id")}
            FROM above {each_row("tool_effects", "effect_id = above.turn_id", "a")}
        )
        SELECT FROM above WHERE NOT waits)
""".strip()

# Call ids are distinct within a turn. In turns of older releases, ids may repeat; then the newest call is returned. A
# call of an agent that answers one of the turn's calls is found by the id of its effect.
FIND_CALL = Statement(
    "turns.find_call",
    f"""
    SELECT e.effect_id, e.turn_id, e.tool, e.arguments, e.status, e.waits_for, e.decide_at <= perdure_now() AS expired,
           coalesce(e.approver, 'user') AS approver, t.agent, t.priority, t.status = 'waiting_approval' AS waits,
           e.waits_for = 'user' AND e.payload ? 'closed' AS unanswered, {_UNWANTED} AS unwanted
    FROM ({below("%(turn_id)s::uuid", all_calls=True)}) AS below {each_row("turns", "turn_id = below.turn_id", "t")}
    {each_row("tool_effects", "turn_id = t.turn_id", "e")}
    {each_row("messages", "session_id = t.session_id AND seq = e.message_seq", "m")}
    WHERE CASE WHEN t.turn_id = %(turn_id)s THEN m.tool_calls -> e.position ->> 'id' ELSE e.effect_id::text END
          = %(call_id)s
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
                      WHERE turn_id = %(turn_id)s AND {keyed("status = 'asked'")} AND effect_id <> %(effect_id)s)
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
    WHERE {asked} AND t.status = 'waiting_approval' AND e.decide_at > perdure_now()
      AND s.end_requested_at IS NULL
""".strip()


def _waiting(name: str, condition: str) -> Statement:
    """A statement that lists the calls that wait for a decision, longest wait first (effect ids grow with time)."""
    page = "e.effect_id > %(after)s::uuid ORDER BY e.effect_id LIMIT %(limit)s"
    waiting = _WAITING.format(asked="e.status = 'asked'")
    return Statement(f"turns.{name}", f"{waiting} AND {condition} AND {page}", writes=False)


WAITING = _waiting("waiting", "true")
WAITING_OF_TENANT = _waiting("waiting_of_tenant", OF_TENANT.format(column="t.user_id"))
WAITING_WITHOUT_TENANT = _waiting("waiting_without_tenant", WITHOUT_TENANT.format(column="t.user_id"))

# `s.unsettled > 0` and `t.settled_at IS NULL` let PostgreSQL find the calls by the user's unsettled turns.
WAITING_OF_USER = _waiting("waiting_of_user", "s.user_id = %(user_id)s AND s.unsettled > 0 AND t.settled_at IS NULL")

# The calls of a turn, and those of the agents that answer its calls.
WAITING_OF_TURN = Statement(
    "turns.waiting_of_turn",
    f"""
    {_WAITING.format(asked=keyed("e.status = 'asked'"))}
      AND t.turn_id = ANY (ARRAY(SELECT turn_id FROM ({below("%(turn_id)s::uuid")}) AS below))
    """,
    writes=False,
)

# --- calls that wait for a task, a client, an agent or a time -------------------------------

# Results come from outside for these.
_AWAITED = "e.waits_for IN ('task', 'client', 'agent', 'user')"

NEW_ANSWER = "jsonb_array_length(coalesce(e.payload -> 'said', '[]')) > coalesce((e.payload ->> 'judged')::int, 0)"

# Records that a task was, or may have been, sent. From then on, the sweeper probes the task (see PROBE_DUE).
NOTE_SENT = Statement(
    "turns.note_sent",
    """
    UPDATE tool_effects
    SET sent_at = coalesce(sent_at, perdure_now()), probe_at = perdure_now()
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

# Ends the wait for such a call whose result has not arrived, and returns what its row records then. Run after
# LOCK_OF_CALL: a result is either recorded before, or refused (`outside`).
CLOSE_CALL = Statement(
    "turns.close_call",
    """
    UPDATE tool_effects
    SET status = CASE WHEN status = 'intended' THEN %(status)s ELSE status END,
        result = CASE WHEN status = 'intended' THEN %(result)s ELSE result END,
        probe_at = CASE WHEN status = 'intended' AND waits_for IN ('task', 'agent')
                        THEN perdure_now() ELSE probe_at END  -- its tasks are revoked, or its agent's turn is cancelled
    WHERE effect_id = %(effect_id)s
    RETURNING status, result
    """,
)

# Ends the wait for all results of a turn that is about to be settled, as SETTLE does, so that no result is accepted
# which the transcript does not have. An answer that is not judged stays: the question takes no other. As the session's
# row is locked before the calls' rows are read, a result is either recorded before, or refused.
CLOSE_CALLS = Statement(
    "turns.close_calls",
    f"""
    WITH locked AS (SELECT session_id FROM sessions WHERE {HELD} FOR NO KEY UPDATE)
    UPDATE tool_effects AS e
    SET status = 'unknown',
        probe_at = CASE WHEN e.waits_for IN ('task', 'agent') THEN perdure_now() ELSE e.probe_at END
    FROM locked
    WHERE e.turn_id = %(turn_id)s AND e.status = 'intended' AND {_AWAITED}
      AND NOT (e.waits_for = 'user' AND {NEW_ANSWER})
    """,
)

# Makes the session of a parked turn claimable if no call of the turn waits any more. `not_before` becomes the present
# time, not null, so that the claim does not count as an attempt (see CLAIM).
RESUME_PARKED = Statement(
    "turns.resume_parked",
    f"""
    UPDATE sessions AS s SET not_before = perdure_now(), woken_at = perdure_now(), wakes = 0
    FROM turns AS t
    WHERE s.session_id = %(session_id)s AND s.lease_until IS NULL AND s.not_before IS NOT NULL AND s.queued_at IS NULL
      AND t.turn_id = %(turn_id)s AND {keyed("t.status = 'parked' AND t.settled_at IS NULL")}
      AND NOT EXISTS (SELECT FROM tool_effects
                      WHERE turn_id = %(turn_id)s AND status = 'intended' AND waits_for IS NOT NULL)
    RETURNING s.session_id
    """,
)

# --- questions to the user -----------------------------------------------------------------

# Whether the turn `t` of a session may wait for a message over this channel. A client that names the agent of each
# message names the one that it knows, which may have handed the turn over before the question.
_LISTENS = """
    t.settled_at IS NULL AND t.status <> 'accepted' AND t.cancel_requested_at IS NULL AND t.channel = %(channel)s
      AND (t.agent = coalesce(%(agent)s, t.agent) OR EXISTS (
            SELECT FROM messages AS m
            WHERE m.session_id = t.session_id AND m.seq >= t.first_seq AND m.turn_id = t.turn_id
              AND m.prompt ->> 'agent' = %(agent)s))
""".strip()

_IS_ASKED = f"e.waits_for = 'user' AND e.status = 'intended' AND NOT {NEW_ANSWER}"

# The calls for which a session's turn waits and which may wait for the user: its own questions, and other agents, which
# may ask.
MAY_ASK = f"""
    SELECT FROM turns AS t JOIN tool_effects AS e USING (turn_id)
    WHERE t.session_id = {{session_id}} AND {_LISTENS}
      AND (e.waits_for = 'agent' AND e.status = 'intended' OR {_IS_ASKED})
""".strip()

# The first question for which a session's turn waits, if the user has not answered it: its own before those of the
# agents that answer its calls, and of these the one that was asked first. `asking_id` is the turn that asks.
_FIRST_QUESTION = f"""
    SELECT e.effect_id, t.turn_id, t.seq, t.status, q.turn_id AS asking_id, q.session_id AS asking_session
    FROM turns AS t
    CROSS JOIN LATERAL ({below("t.turn_id")}) AS below {each_row("turns", "turn_id = below.turn_id", "q")}
    {each_row("tool_effects", "turn_id = q.turn_id", "e")}
    WHERE t.session_id = %(session_id)s AND {_LISTENS} AND {_IS_ASKED}
    ORDER BY CASE WHEN q.turn_id <> t.turn_id THEN e.intended_at END NULLS FIRST, e.message_seq, e.position, e.effect_id
    LIMIT 1
""".strip()

_SAID = """
    payload = coalesce(e.payload, '{}') || jsonb_build_object(
        'said', coalesce(e.payload -> 'said', '[]') || %(said)s::jsonb)
""".strip()

_WAKE_ANSWERED = """
        UPDATE sessions AS s
        SET not_before = CASE WHEN s.lease_until IS NULL AND s.not_before IS NOT NULL AND s.queued_at IS NULL
                              THEN perdure_now() ELSE s.not_before END,
            woken_at = CASE WHEN s.lease_until IS NULL THEN perdure_now() ELSE s.woken_at END,
            wakes = CASE WHEN s.lease_until IS NULL THEN 0 ELSE s.wakes END, last_activity_at = perdure_now()
        FROM answered WHERE s.session_id = answered.session_id
        RETURNING s.session_id, s.lease_until IS NULL AS wakes
""".strip()

# Records a message of a locked session as the answer to the first of its questions. The message's row belongs to the
# session's turn, and the members of its metadata are added to those of this turn and of the one that asks. Writes
# nothing if the session of the turn that asks is not among the `locked` ones: the caller locks it and tries again.
ANSWER_QUESTION = Statement(
    "turns.answer_question",
    f"""
    WITH first AS (
        {_FIRST_QUESTION}
    ), question AS (
        SELECT * FROM first WHERE asking_session = ANY (%(locked)s::uuid[])
    ), answered AS (
        UPDATE tool_effects AS e SET {_SAID}
        FROM question WHERE e.effect_id = question.effect_id
        RETURNING question.asking_session AS session_id
    ), input AS (
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, parts, accepted_at)
        SELECT %(user_id)s, %(channel)s, %(message_id)s, turn_id,
               (SELECT max(position) + 1 FROM inbox WHERE turn_id = question.turn_id), %(text)s, %(parts)s::jsonb,
               perdure_now()
        FROM question
    ), told AS (
        UPDATE turns AS t SET metadata = coalesce(t.metadata, '{{}}') || %(metadata)s::jsonb
        FROM question
        WHERE t.turn_id IN (question.turn_id, question.asking_id) AND %(metadata)s::jsonb IS NOT NULL
    ), woken AS (
        {_WAKE_ANSWERED}
    )
    SELECT effect_id, asking_session, turn_id, seq, status, (SELECT wakes FROM woken) AS wakes FROM first
    """,
)

# Records a value as the answer to a question, unless it has one. Run after LOCK_OF_CALL.
ANSWER_BY_VALUE = Statement(
    "turns.answer_by_value",
    f"""
    WITH answered AS (
        UPDATE tool_effects AS e SET {_SAID}
        FROM turns AS t
        WHERE e.effect_id = %(effect_id)s AND t.turn_id = e.turn_id AND e.status = 'intended' AND NOT {NEW_ANSWER}
        RETURNING t.session_id, t.priority
    ), woken AS (
        {_WAKE_ANSWERED}
    )
    SELECT session_id, priority, wakes FROM answered JOIN woken USING (session_id)
    """,
)

# Records that an answer does not fit. The question is to be sent again (`sent_at`; see WAIT_CALLS).
REFUSE_ANSWER = Statement(
    "turns.refuse_answer",
    """
    UPDATE tool_effects SET payload = payload || %(refused)s::jsonb, sent_at = NULL
    WHERE effect_id = %(effect_id)s AND status = 'intended'
      AND coalesce((payload ->> 'judged')::int, 0) = %(judged)s::int - 1
    """,
)

# Records the tokens of guards that refuse the answer number `judged`.
CHARGE_QUESTION = Statement(
    "turns.charge_question",
    """
    UPDATE tool_effects SET payload = payload || %(used)s::jsonb
    WHERE effect_id = %(effect_id)s AND status = 'intended'
      AND coalesce((payload ->> 'judged')::int, 0) = %(judged)s::int
    """,
)

# Ends a question without an answer. Changes nothing if it has one. Run after LOCK_OF_CALL. `closed` tells later answers
# that the status is not that of an answer.
CLOSE_QUESTION = Statement(
    "turns.close_question",
    f"""
    UPDATE tool_effects AS e
    SET status = %(status)s, result = %(result)s, finished_at = perdure_now(),
        payload = coalesce(e.payload, '{{}}') || '{{"closed": true}}'
    WHERE effect_id = %(effect_id)s AND status = 'intended' AND NOT {NEW_ANSWER}
    RETURNING effect_id
    """,
)

# Takes the calls whose tasks are due, longest due first. If a turn waits for a call, the call's tasks must be probed;
# otherwise they must be revoked. The pause until the next probe grows with the age of the call,
# unless a client follows the turn (`followed`). If a `probe_at` is
# further in the future than the longest pause, the server's clock was ahead when it was written: it counts as past.
PROBE_DUE = Statement(
    "sweep.probe_due",
    """
    WITH due AS (
        (SELECT effect_id FROM tool_effects WHERE probe_at <= perdure_now()
         ORDER BY probe_at LIMIT (SELECT %(most)s::bigint))
        UNION
        (SELECT effect_id FROM tool_effects WHERE probe_at > perdure_now() + interval '1 hour'
         ORDER BY probe_at LIMIT (SELECT %(most)s::bigint))
        UNION
        (SELECT effect_id FROM tool_effects
         WHERE turn_id = ANY (%(followed)s::uuid[]) AND status = 'intended'
           AND probe_at > perdure_now() + make_interval(secs => %(followed_s)s)
         LIMIT (SELECT %(most)s::bigint))
        LIMIT %(most)s
    ), locked AS (
        SELECT effect_id FROM tool_effects WHERE effect_id = ANY (ARRAY(SELECT effect_id FROM due))
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE tool_effects AS e
    SET probe_at = perdure_now() + make_interval(
            secs => CASE WHEN e.turn_id = ANY (%(followed)s::uuid[]) THEN %(followed_s)s
                         ELSE least(greatest(extract(epoch FROM perdure_now() - e.intended_at) / 4, %(least_s)s),
                                    %(most_s)s) END)
    FROM locked WHERE e.effect_id = locked.effect_id
    RETURNING e.effect_id, e.turn_id, e.status = 'intended' AS waits, e.progress, e.parts, e.waits_for
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

# --- calls and questions for the client of a request ----------------------------------------

# The messages of a turn at which it waits, or has waited, for the client of a request: for the results of the tools
# that the client brought (`additions`), or for the user's answer. `number` counts the turn's messages from 1.
_FOR_CLIENT = f"""
    SELECT e.effect_id, t.turn_id, t.user_id, e.message_seq - t.first_seq + 1 AS number, e.position, e.tool,
           e.arguments, e.waits_for, e.payload ->> 'problem' AS problem,
           e.status NOT IN ('asked', 'approved', 'denied') AS is_begun,
           e.status = 'intended' AND NOT (e.waits_for = 'user' AND {NEW_ANSWER}) AS is_open
    FROM turns AS t JOIN tool_effects AS e USING (turn_id)
    WHERE (e.waits_for = 'user' OR e.waits_for = 'client' AND t.additions -> 'names' ? e.tool)
""".strip()

# Whether the turn `t` waits for the client of a request.
STOPPED = f"""
        SELECT FROM tool_effects AS e
        WHERE e.turn_id = t.turn_id AND e.status = 'intended'
          AND (e.waits_for = 'client' AND t.additions -> 'names' ? e.tool OR e.waits_for = 'user' AND NOT {NEW_ANSWER})
""".strip()

STOPS = Statement(
    "turns.stops", f"{_FOR_CLIENT} AND t.turn_id = %(turn_id)s ORDER BY e.message_seq, e.position", writes=False
)

# The last stop before the message of `turn_id` in the turn that it has joined (`steer`); no row if there is none.
STOP_BEFORE = Statement(
    "turns.stop_before",
    """
    SELECT max(e.message_seq - t.first_seq + 1)::int AS number
    FROM unrouted AS u JOIN turns AS t ON t.turn_id = u.routed_to
    JOIN messages AS m ON m.session_id = t.session_id AND m.turn_id = t.turn_id AND m.role = 'user'
        AND m.message_id = u.message ->> 'message_id'
    JOIN tool_effects AS e ON e.turn_id = t.turn_id AND e.message_seq < m.seq
        AND (e.waits_for = 'user' OR e.waits_for = 'client' AND t.additions -> 'names' ? e.tool)
    WHERE u.turn_id = %(turn_id)s
    HAVING count(*) > 0
    """,
    writes=False,
)

CLIENT_CALLS = Statement(
    "turns.client_calls",
    f"{_FOR_CLIENT} AND e.effect_id = ANY (%(effect_ids)s::uuid[]) AND e.waits_for = 'client'",
    writes=False,
)

# Shortens the time limit of the calls for whose results a session's turn waits, while a newer turn waits behind it:
# a client may have ended its run with a call. They are due `grace_s` seconds after they were made, or now.
HASTEN = Statement(
    "turns.hasten",
    """
    WITH locked AS (
        SELECT session_id FROM sessions WHERE session_id = %(session_id)s AND unsettled > 1 FOR NO KEY UPDATE
    ), hastened AS (
        UPDATE tool_effects AS e
        SET decide_at = greatest(perdure_now(), e.intended_at + make_interval(secs => %(grace_s)s))
        FROM locked JOIN turns AS t ON t.session_id = %(session_id)s AND t.settled_at IS NULL AND t.status = 'parked'
        WHERE e.turn_id = t.turn_id AND e.status = 'intended' AND e.waits_for = 'client'
          AND t.additions -> 'names' ? e.tool
          AND e.decide_at > greatest(perdure_now(), e.intended_at + make_interval(secs => %(grace_s)s))
        RETURNING locked.session_id, e.decide_at
    )
    UPDATE sessions AS s SET not_before = least(s.not_before, due.at)
    FROM (SELECT session_id, min(decide_at) AS at FROM hastened GROUP BY session_id) AS due
    WHERE s.session_id = due.session_id AND s.lease_until IS NULL AND s.not_before IS NOT NULL AND s.queued_at IS NULL
    """,
)

# Replaces what a turn's client adds to the agent, by the additions of the request that brings results. A turn of which
# nothing may be remembered stays so, also if its conversation was left out after the request had read the additions.
SET_ADDITIONS = Statement(
    "turns.set_additions",
    f"""
    UPDATE turns
    SET additions = CASE WHEN additions -> 'remember' = 'false'
                         THEN coalesce(%(additions)s::jsonb, '{{}}') || '{{"remember": false}}'
                         ELSE %(additions)s::jsonb END
    WHERE turn_id = %(turn_id)s AND {keyed("settled_at IS NULL")}
    """,
)

# Nothing of an unsettled turn may be remembered from now on: also what was said before is no longer searched.
FORGET_TURN = Statement(
    "turns.forget_turn",
    f"""
    WITH forgotten AS (
        UPDATE turns SET additions = coalesce(additions, '{{}}') || '{{"remember": false}}'
        WHERE turn_id = %(turn_id)s AND {keyed("settled_at IS NULL")}
        RETURNING session_id, turn_id, first_seq
    ), said AS (
        SELECT m.session_id, m.seq FROM forgotten AS f JOIN messages AS m USING (session_id)
        WHERE m.seq >= f.first_seq AND m.turn_id = f.turn_id
    ), queued AS (
        DELETE FROM unembedded AS u USING said WHERE u.kind = 'message' AND u.id = said.session_id AND u.seq = said.seq
    )
    DELETE FROM message_words AS w USING said WHERE w.session_id = said.session_id AND w.seq = said.seq
    """,
)

ADDITIONS = Statement("turns.additions", "SELECT additions FROM turns WHERE turn_id = %(turn_id)s", writes=False)

# The tokens of a turn's messages after the first `after`, up to the number `until` (NULL: the last). If no model's
# server reported them, the estimates that are stored with these messages.
USED_BETWEEN = Statement(
    "turns.used_between",
    f"""
    SELECT CASE WHEN count(usage) > 0 THEN jsonb_build_object({_TOKENS}) ELSE jsonb_build_object(
               'input_tokens', coalesce(sum(token_count) FILTER (WHERE role <> 'assistant'), 0),
               'output_tokens', coalesce(sum(token_count) FILTER (WHERE role = 'assistant'), 0),
               'estimated', true) END AS used
    FROM (SELECT m.usage, m.role, m.token_count
          FROM messages AS m JOIN turns AS t ON t.session_id = m.session_id AND t.turn_id = m.turn_id
          WHERE t.turn_id = %(turn_id)s AND m.seq >= t.first_seq + %(after)s
            AND (%(until)s::int IS NULL OR m.seq < t.first_seq + %(until)s::int)) AS said
    """,
    writes=False,
)

# --- calls of another agent ----------------------------------------------------------------

# Opens the session in which another agent answers a call, with its only turn. Both have the id of the call, so that the
# statement may be repeated, and each can be found from the other. The task is the turn's message; its `position` 0 says
# that no user wrote it. The turn has the user, the channel, the priority and the metadata of the caller's turn.
# Opens nothing if the call does not wait, or if `most` agents have delegated above it already (`too_deep`).
DELEGATE = Statement(
    "turns.delegate",
    f"""
    WITH caller AS (
        SELECT session_id, user_id, depth FROM sessions WHERE {HELD} FOR NO KEY UPDATE
    ), call AS (
        UPDATE tool_effects AS e
        SET sent_at = coalesce(e.sent_at, perdure_now()),
            probe_at = perdure_now() + make_interval(secs => %(probe_s)s)
        FROM caller
        WHERE e.effect_id = %(effect_id)s AND e.status = 'intended' AND e.finished_at IS NULL
          AND caller.depth < %(most)s
        RETURNING e.effect_id
    ), asking AS (
        SELECT channel, priority, metadata, traceparent FROM turns WHERE turn_id = %(turn_id)s
    ), opened AS (
        INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at,
                              channels, last_turn_seq, unsettled, woken_at, priority, depth)
        SELECT call.effect_id, caller.user_id, '>' || call.effect_id, false, %(agent)s,
               {sql(Trigger.SESSION_CREATED, column=f"'{State.INITIALIZING}'")}, perdure_now(), perdure_now(),
               ARRAY[asking.channel], 1, 1, perdure_now(), asking.priority, caller.depth + 1
        FROM call, caller, asking
        ON CONFLICT (session_id) DO NOTHING
        RETURNING session_id, user_id
    ), turn AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, metadata, status, traceparent,
                           accepted_at)
        SELECT session_id, session_id, 1, user_id, %(agent)s, channel, priority, metadata, 'accepted',
               -- the span of the call, as `observe.otel` computes it; an accept that was not traced left none above it
               coalesce(left(traceparent, 36), '00-' || replace(%(turn_id)s::uuid::text, '-', '') || '-')
               || right(replace(session_id::text, '-', ''), 16) || coalesce(right(traceparent, 3), '-01'),
               perdure_now()
        FROM opened, asking
    ), input AS (
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, accepted_at)
        SELECT user_id, channel, session_id::text, session_id, 0, %(task)s, perdure_now() FROM opened, asking
    )
    SELECT caller.depth >= %(most)s AS too_deep, asking.priority, EXISTS (SELECT FROM opened) AS is_new
    FROM caller, asking
    """,
)

# The turn that answers a call, with its reply.
ANSWER = Statement(
    "turns.answer_of_call",
    """
    SELECT t.agent, t.status, t.settled_at IS NOT NULL AS is_settled, t.error_message, t.data, r.content AS reply
    FROM turns AS t LEFT JOIN messages AS r ON r.session_id = t.session_id AND r.seq = t.reply_seq
    WHERE t.turn_id = %(effect_id)s
    """,
    writes=False,
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
