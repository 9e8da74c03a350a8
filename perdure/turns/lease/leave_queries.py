"""Every statement that ends a lease: there is no other way out of a session that runs turns.

A turn that stops without being settled is left by one of the statements made by `_stopping`. They all have one shape:
the session's row loses its lease and the claim that this worker counted, the turn's row gets a status, and the row that
comes back tells what the caller needs for the wake-up and the log. SETTLE writes the end of a turn. The others leave
sessions whose turns did not run, or of which this process knows nothing more. `turns.run.leave` runs these statements.
"""

from __future__ import annotations

from perdure.casebank.queries import WITH_USES
from perdure.database.engine import Statement
from perdure.database.fencing import HELD, UNLEASED
from perdure.database.keyed import keyed
from perdure.sessions.states import State, Trigger, sql
from perdure.snapshots.queries import NEXT_VARIABLES_TICK, WITH_STEP
from perdure.turns.lease.queries import IS_OLDEST

_NOW = "perdure_now()"


def _stopping(
    name: str,
    session: str,
    *,
    turn: str = "status = 'parked'",
    charged: bool = False,
    state: str = sql(Trigger.TURN_STOPPED),
    unless: str = "",
    delivery: str = "",
) -> Statement:
    """A statement that releases the session during a turn, which the next worker continues from the last commit.

    Args:
        name: The statement's name.
        session: Assignments to the session's row: when it is due again.
        turn: Assignments to the turn's row.
        charged: The claim stays counted as a failed attempt.
        state: The session's next state.
        unless: A further condition. If it does not hold, the statement writes nothing and returns no row.
        delivery: A CTE `asked` that returns the id of a new delivery.
    """
    return Statement(
        f"turns.{name}",
        f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = NULL, lease_owner = NULL, spent_s = %(spent_s)s, claims = greatest(claims - 1, 0),
            {"" if charged else "strikes = greatest(strikes - 1, 0),"} state = {state}, {session}
        WHERE {HELD} {unless}
        RETURNING session_id, user_id, scope, priority, strikes, wakes, woken_at
    ), stopped AS (
        UPDATE turns AS t SET {turn}
        FROM fenced WHERE t.turn_id = %(turn_id)s AND {keyed("t.settled_at IS NULL")}
        RETURNING t.turn_id, t.reply_to, fenced.user_id, fenced.scope
    ){delivery}
    SELECT fenced.priority, fenced.strikes, fenced.wakes, fenced.woken_at IS NULL AS due,
           {"(SELECT delivery_id FROM asked)" if delivery else "NULL::uuid"} AS delivery_id
    FROM fenced, stopped
    """,
    )


# --- a turn stops, and is not settled ------------------------------------------------------

SHUT_DOWN = _stopping("shut_down", "woken_at = NULL")

# The sweeper wakes the session after a pause of `sweep_s` seconds that doubles with `wakes`. The session counts as
# woken, so that no drain takes it before (see DRAINABLE), and so much earlier that the pause of WAKE_DUE is as long.
POSTPONE = _stopping(
    "postpone",
    f"""wakes = %(wakes)s::int + 1,
            woken_at = {_NOW} - make_interval(secs => %(sweep_s)s * 2 ^ %(wakes)s::int)""",
    turn="status = 'parked', unsaved_error = %(error)s",
)

# The claim stays counted as a failed attempt (`strikes`). The sweeper's pause before the next claim doubles with each
# strike. After the last permitted attempt, the session is due in the sweeper's next round, and the next claim settles
# the turn as failed.
STRIKE = _stopping(
    "strike",
    f"""wakes = least(greatest(strikes - 1, 0), 6),
            woken_at = CASE WHEN strikes < %(max_attempts)s OR strikes > %(max_attempts)s + 1 THEN {_NOW} END""",
    turn="status = 'parked', attempt_error = coalesce(%(error)s, t.attempt_error)",
    charged=True,
)

# For a worker that has the agent and the tools of the turn. The pause before the next wake-up is as short as that of a
# session that a worker has refused (see CLAIM).
LEAVE = _stopping(
    "leave",
    f"""woken_at = {_NOW}, wakes = 1,
            unequipped_since = coalesce(least(unequipped_since, {_NOW}), {_NOW})""",
    turn="status = 'parked', attempts = greatest(t.attempts - 1, 0)",
)

# --- a turn waits --------------------------------------------------------------------------
#
# No worker claims the session before `not_before`. These statements run after LOCK, which cancelling a turn, ending a
# session, deciding about a call and recording a task's result also take, so that they see the commits of these.

LOCK = Statement("turns.lock_held", f"SELECT token FROM sessions WHERE {HELD} FOR NO KEY UPDATE")

IS_CANCELLED = Statement(
    "turns.is_cancelled",
    "SELECT turn_id FROM turns WHERE turn_id = %(turn_id)s AND cancel_requested_at IS NOT NULL",
    writes=False,
)

# This worker had the agent and the tools, so the turn does not wait for one that has them.
_WAITS = f"woken_at = {_NOW}, wakes = 0, unequipped_since = NULL"

_CANCELLED = "AND NOT EXISTS (SELECT FROM turns WHERE turn_id = %(turn_id)s AND cancel_requested_at IS NOT NULL)"
_OVER = f"AND {keyed('end_requested_at IS NULL')} {_CANCELLED}"
_CALLS = "FROM tool_effects WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s"
_OPEN = f"{_CALLS} AND status ="

# The receiver of the turn that stops. If it answers a call of another agent, that of the conversation's turn.
_RECEIVER = """, receiver AS (
        WITH RECURSIVE above (turn_id, reply_to) AS (
            SELECT turn_id, reply_to FROM stopped
            UNION ALL
            SELECT t.turn_id, t.reply_to
            FROM above JOIN tool_effects AS e ON e.effect_id = above.turn_id AND e.waits_for = 'agent'
            JOIN turns AS t ON t.turn_id = e.turn_id
            WHERE above.reply_to IS NULL
        )
        SELECT reply_to FROM above WHERE reply_to IS NOT NULL
    )"""

# Until the calls are decided or expire. For a turn with a receiver, also writes the delivery of the request.
WAIT_APPROVAL = _stopping(
    "wait_approval",
    f"""{_WAITS}, paced = false,
            not_before = (SELECT min(decide_at) {_CALLS} AND {keyed("status = 'asked'")})""",
    turn="status = 'waiting_approval'",
    state=f"CASE state WHEN '{State.WAITING_APPROVAL}' THEN state ELSE {sql(Trigger.APPROVAL_NEEDED)} END",
    unless=_OVER,
    delivery=f"""{_RECEIVER}, asked AS (
        INSERT INTO deliveries (delivery_id, turn_id, user_id, scope, asking_seq, target, status, due_at, created_at)
        SELECT %(delivery_id)s::uuid, turn_id, user_id, scope, %(message_seq)s,
               receiver.reply_to || '{{"approval": true}}', 'pending', {_NOW}, {_NOW}
        FROM stopped, receiver
        ON CONFLICT DO NOTHING
        RETURNING delivery_id
    )""",
)

# Records the results of a message's calls while other calls of the same message still wait. All results enter the
# transcript later, together. CLOSE_CALL has recorded those of the calls for which the turn no longer waits.
RECORD_RESULTS = Statement(
    "turns.record_results",
    """
    UPDATE tool_effects AS t
    SET status = r.status, result = r.result,
        payload = CASE WHEN t.waits_for = 'user' AND r.used IS NOT NULL
                       THEN coalesce(t.payload, '{}') || jsonb_build_object('used', r.used) ELSE t.payload END,
        finished_at = CASE WHEN r.status <> 'unknown' THEN perdure_now() END, probe_at = NULL
    FROM jsonb_to_recordset(%(results)s::jsonb) AS r (effect_id uuid, status text, result text, used jsonb)
    WHERE t.effect_id = r.effect_id AND t.turn_id = %(turn_id)s AND t.status IN ('intended', 'approved')
      AND t.finished_at IS NULL
    """,
)

# Until the first of the waiting calls is due, or until it is time to send a task again that the broker did not accept.
# The turn goes on at once if the user has answered a question. For a turn with a receiver, also writes the delivery of
# the first question that is not sent yet, in place of that of an earlier one of the same reply.
WAIT_CALLS = _stopping(
    "wait_calls",
    f"""{_WAITS}, paced = false,
            not_before = (
                SELECT min(CASE WHEN waits_for = 'task' AND sent_at IS NULL
                                THEN least(decide_at, {_NOW} + make_interval(secs => %(retry_s)s)) ELSE decide_at END)
                {_OPEN} 'intended' AND waits_for IS NOT NULL)""",
    unless=f"""{_OVER} AND EXISTS (SELECT {_OPEN} 'intended' AND waits_for IS NOT NULL)
          AND NOT EXISTS (SELECT {_OPEN} 'intended' AND waits_for = 'user' AND
                          jsonb_array_length(payload -> 'said') > coalesce((payload ->> 'judged')::int, 0))""",
    delivery=f"""{_RECEIVER}, question AS (
        UPDATE tool_effects SET sent_at = {_NOW}
        WHERE effect_id = (SELECT effect_id {_OPEN} 'intended' AND waits_for = 'user' ORDER BY position LIMIT 1)
          AND sent_at IS NULL AND EXISTS (SELECT FROM stopped)
        RETURNING effect_id
    ), asked AS (
        INSERT INTO deliveries AS d (delivery_id, turn_id, user_id, scope, asking_seq, target, status, due_at,
                                     created_at)
        SELECT %(delivery_id)s::uuid, turn_id, user_id, scope, %(message_seq)s,
               receiver.reply_to || '{{"question": true}}', 'pending', {_NOW}, {_NOW}
        FROM stopped, question, receiver
        ON CONFLICT (turn_id, asking_seq) DO UPDATE
        SET delivery_id = excluded.delivery_id, target = excluded.target, status = 'pending', attempts = 0,
            due_at = excluded.due_at, last_error = NULL, created_at = excluded.created_at, delivered_at = NULL,
            wake_at = NULL, wakes = 0
        RETURNING delivery_id
    )""",
)

# Until a model may answer. Records the error and the number of steps in the turn's row. The API shows the turn as
# delayed until the turn has committed another step, even while a worker retries the turn.
WAIT_MODEL = _stopping(
    "park_for",
    f"""{_WAITS}, paced = %(paced)s, parked_for = %(model)s,
            not_before = {_NOW} + make_interval(secs => %(wait_s)s)""",
    turn="status = 'parked', error_code = %(error_code)s, steps = %(steps)s",
    unless=_CANCELLED,
)

# Whether the user of a row of `sessions` has queued sessions.
_OTHERS_WAIT = """
    EXISTS (SELECT FROM sessions AS q
            WHERE q.user_id = {mine}.user_id AND q.unsettled > 0 AND q.queued_at IS NOT NULL)
""".strip()

# Writes the delivery of a settled turn that has a receiver.
WITH_DELIVERY = """
    owed AS (
        INSERT INTO deliveries (delivery_id, turn_id, user_id, scope, target, status, due_at, created_at)
        SELECT %(delivery_id)s::uuid, turn_id, user_id, scope, reply_to, 'pending', perdure_now(), perdure_now()
        FROM {turns}
        RETURNING delivery_id
    )
""".strip()

# --- a turn is settled ---------------------------------------------------------------------

# Appends `messages` to the transcript. `base`, a column of the CTE `fenced`, is the number of messages before them.
WITH_MESSAGES = """
    said AS (
        INSERT INTO messages (session_id, seq, turn_id, role, content, tool_calls, tool_call_id, message_id, channel,
                              token_count, model, fallback, usage, stop_reason, opaque, parts, prompt, created_at)
        SELECT fenced.session_id, fenced.base + m.position, %(turn_id)s::uuid, m.role, m.content, m.tool_calls,
               m.tool_call_id, m.message_id, %(channel)s, m.token_count, m.model, m.fallback, m.usage,
               m.stop_reason, m.opaque, m.parts, m.prompt, coalesce(m.created_at, perdure_now())
        FROM fenced, jsonb_to_recordset(%(messages)s::jsonb) AS m (
            position int, role text, content text, tool_calls jsonb, tool_call_id text, message_id text,
            token_count int, model text, fallback boolean, usage jsonb, stop_reason text, opaque jsonb, parts jsonb,
            prompt jsonb, created_at timestamptz)
    )
""".strip()

# Settles a turn: writes its last messages, its outcome and its delivery. Releases the session, unless `keep` is set and
# the session has more turns. `unsettled` is read from the locked row, so that a concurrently accepted turn is counted.
# `saved`: the snapshot store already has the snapshot of the tick that this statement commits. Inserts a row for each
# use of a case, and locks no case. `tick`, if not null, must equal the session's tick, so that a repeated statement has
# no effect. A session that answers a call of another agent (`depth`) ends with its turn.
SETTLE = Statement(
    "turns.settle",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET message_count = message_count + %(added)s,
            tick = tick + 1,
            turn_count = turn_count + 1,
            unsettled = unsettled - 1,
            state = CASE WHEN %(status)s::text = 'done' THEN {sql(Trigger.RESPONSE_COMPLETE)}
                         ELSE {sql(Trigger.TURN_STOPPED)} END,
            strikes = 0,
            claims = 0,
            deaths = 0,
            unequipped_since = NULL,
            paced = false,
            spent_s = 0,
            variables_tick = {NEXT_VARIABLES_TICK},
            saved_token = CASE WHEN %(saved)s THEN token ELSE saved_token END,
            saved_tick = CASE WHEN %(saved)s THEN tick + 1 ELSE saved_tick END,
            last_activity_at = perdure_now(),
            lease_until = CASE WHEN %(keep)s AND unsettled > 1
                               THEN perdure_now() + make_interval(secs => %(lease_s)s) END,
            lease_owner = CASE WHEN %(keep)s AND unsettled > 1 THEN lease_owner END,
            end_requested_at = CASE WHEN depth > 0 THEN coalesce(end_requested_at, perdure_now())
                                    ELSE end_requested_at END
        WHERE {HELD} AND tick = coalesce(%(tick)s::bigint, tick)
        RETURNING session_id, user_id, scope, token, tick, message_count - %(added)s AS base, unsettled,
                  end_requested_at, lease_until, depth
    ), {WITH_MESSAGES}, settled AS (
        UPDATE turns AS t
        SET status = %(status)s, steps = %(steps)s, usage = %(usage)s::jsonb, data = %(data)s::jsonb,
            settled_at = perdure_now(), settled_tick = fenced.tick, unsaved = NULL, unsaved_error = NULL,
            error_code = %(error_code)s, error_message = %(error_message)s,
            reply_seq = CASE WHEN %(replied)s THEN fenced.base + %(added)s END
        FROM fenced WHERE t.turn_id = %(turn_id)s
        RETURNING t.turn_id, t.reply_to, fenced.user_id, fenced.scope
    ), doubtful AS (
        UPDATE tool_effects AS e
        SET status = CASE e.status WHEN 'intended' THEN 'unknown' WHEN 'asked' THEN 'denied' ELSE 'failed' END,
            probe_at = CASE WHEN e.status = 'intended' AND e.waits_for IN ('task', 'agent')
                            THEN perdure_now() END  -- the sweeper revokes its tasks, and cancels the agent's turn
        FROM fenced WHERE e.turn_id = %(turn_id)s AND e.status IN ('intended', 'asked', 'approved')
    ), {WITH_STEP.strip()}, {WITH_USES.strip()}, {WITH_DELIVERY.format(turns="settled WHERE reply_to IS NOT NULL")}
    SELECT fenced.unsettled, fenced.unsettled = 0 AND fenced.end_requested_at IS NOT NULL AS may_end,
           (SELECT delivery_id FROM owed) AS delivery_id, fenced.depth > 0 AS answers_call,
           fenced.lease_until IS NULL AND {_OTHERS_WAIT.format(mine="fenced")} AS others_wait
    FROM fenced
    """,
)

# --- no turn runs --------------------------------------------------------------------------

# Releases a session after its time slice. If the session has more turns and its user has queued sessions, the session
# is queued behind them (see ADMIT).
RELEASE = Statement(
    "turns.release",
    f"""
    WITH behind AS (
        SELECT %(woken)s AND mine.unsettled > 0 AND {_OTHERS_WAIT.format(mine="mine")} AS others
        FROM sessions AS mine WHERE mine.session_id = %(session_id)s
    )
    UPDATE sessions SET lease_until = NULL, lease_owner = NULL, woken_at = CASE WHEN %(woken)s THEN perdure_now() END,
           strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
           queued_at = CASE WHEN behind.others THEN perdure_now() END,
           not_before = CASE WHEN behind.others THEN perdure_now() + interval '1 hour' END,
           state = {sql(Trigger.TURN_STOPPED)}
    FROM behind
    WHERE {HELD}
    RETURNING unsettled, unsettled = 0 AND end_requested_at IS NOT NULL AS may_end, priority, user_id,
              behind.others AS queued
    """,
)

# Releases all sessions of a process that exits, and parks their running turns. A session that is being ended or
# consolidated keeps its state. The sessions are locked in the order of BLAME, so that neither waits for the other.
RELEASE_ALL = Statement(
    "turns.release_all",
    f"""
    WITH mine AS (
        SELECT s.session_id FROM sessions AS s
        JOIN unnest(%(session_ids)s::uuid[], %(tokens)s::bigint[], %(nonces)s::uuid[])
                 AS fences (session_id, token, nonce) USING (session_id, token, nonce)
        ORDER BY s.session_id FOR NO KEY UPDATE OF s
    ), fenced AS (
        UPDATE sessions AS s
        SET lease_until = NULL, lease_owner = NULL, woken_at = NULL,
            strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
            state = CASE WHEN s.state IN ('{State.SUMMARIZING}', '{State.ENDING}', '{State.ENDED}') THEN s.state
                         ELSE {sql(Trigger.TURN_STOPPED, column="s.state")} END
        FROM mine WHERE s.session_id = mine.session_id
        RETURNING s.session_id, s.state
    ), parked AS (
        UPDATE turns AS t SET status = 'parked' FROM fenced
        WHERE t.session_id = fenced.session_id AND t.settled_at IS NULL AND t.status = 'running'
    )
    SELECT session_id, state FROM fenced
    """,
)

# Counts the time of a dedicated process that ended before it claimed the session. If it is `charged` (1), it also
# counts as a failed attempt, like STRIKE. Otherwise (0), `wakes` stays, so that the pause grows with each wake-up. The
# fence is that of the session when the process was started: a claim by another process voids the statement.
FAILED_START = Statement(
    "turns.failed_start",
    f"""
    WITH struck AS (
        UPDATE sessions
        SET strikes = strikes + %(charged)s::int, spent_s = spent_s + %(elapsed_s)s,
            lease_until = NULL, lease_owner = NULL,
            wakes = CASE %(charged)s::int WHEN 1 THEN least(strikes, 6) ELSE wakes END,
            woken_at = CASE WHEN strikes + %(charged)s::int < %(max_attempts)s THEN perdure_now() END
        WHERE session_id = %(session_id)s AND token = %(token)s AND nonce IS NOT DISTINCT FROM %(nonce)s::uuid
          AND unsettled > 0
          AND {UNLEASED}
        RETURNING session_id, strikes, spent_s
    )
    UPDATE turns AS t
    SET status = 'parked', attempts = t.attempts + %(charged)s::int, attempt_error = %(error)s,
        started_at = coalesce(t.started_at, perdure_now())
    FROM struck
    WHERE {IS_OLDEST.format(session="%(session_id)s")}
    RETURNING t.turn_id, t.agent, struck.strikes, struck.spent_s
    """,
)
