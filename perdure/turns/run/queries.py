"""The statements of a running turn: its history, its steps and its settlement."""

from __future__ import annotations

from perdure.casebank.queries import WITH_USES
from perdure.database.engine import Statement
from perdure.database.fencing import HELD
from perdure.errors import ContentFiltered, ContextTooLong
from perdure.sessions.states import Trigger, sql
from perdure.snapshots.queries import NEXT_VARIABLES_TICK, WITH_STEP, pending
from perdure.turns.lease.claim import ISOLATE_FROM_CLAIM

LEFT_OUT = (ContextTooLong.code, ContentFiltered.code)
"""A turn that failed with one of these codes is left out of later prompts: its messages would fail them, too."""

_LEFT_OUT = f"(status = 'failed' AND error_code IN {LEFT_OUT})"

# The messages of the last `window` turns from the transcript, then the present turn's messages from the inbox if the
# transcript does not have them yet. The replies of failed turns are omitted. The cost depends on the window, not on the
# session's length.
HISTORY = Statement(
    "turns.history",
    f"""
    SELECT m.seq, m.turn_id, m.role, m.content, m.tool_calls, m.tool_call_id, m.token_count, m.usage,
           NULL::text AS message_id, m.created_at, NULL::int AS position
    FROM messages AS m
    WHERE m.session_id = %(session_id)s AND m.seq >= (
        SELECT min(first_seq) FROM (
            SELECT first_seq FROM turns
            WHERE session_id = %(session_id)s AND seq <= %(turn_seq)s AND first_seq IS NOT NULL
              AND {_LEFT_OUT} IS NOT TRUE
            ORDER BY seq DESC LIMIT %(window)s) AS recent)
      AND (SELECT {_LEFT_OUT} OR (status = 'failed' AND reply_seq = m.seq)
           FROM turns WHERE turn_id = m.turn_id) IS NOT TRUE  -- as SPOKEN
    UNION ALL
    SELECT NULL, i.turn_id, 'user', i.text, NULL, NULL, NULL, NULL, i.message_id, i.accepted_at, i.position
    FROM inbox AS i
    WHERE i.turn_id = %(turn_id)s
      AND NOT EXISTS (SELECT FROM messages WHERE session_id = %(session_id)s AND seq = %(first_seq)s)
    ORDER BY seq NULLS LAST, position
    """,
    writes=False,
)

# Appends `messages` to the transcript. `base`, a column of the CTE `fenced`, is the number of messages before them.
_WITH_MESSAGES = """
    said AS (
        INSERT INTO messages (session_id, seq, turn_id, role, content, tool_calls, tool_call_id, message_id, channel,
                              token_count, model, fallback, usage, stop_reason, created_at)
        SELECT fenced.session_id, fenced.base + m.position, %(turn_id)s::uuid, m.role, m.content, m.tool_calls,
               m.tool_call_id, m.message_id, %(channel)s, m.token_count, m.model, m.fallback, m.usage,
               m.stop_reason, coalesce(m.created_at, perdure_now())
        FROM fenced, jsonb_to_recordset(%(messages)s::jsonb) AS m (
            position int, role text, content text, tool_calls jsonb, tool_call_id text, message_id text,
            token_count int, model text, fallback boolean, usage jsonb, stop_reason text, created_at timestamptz)
    )
""".strip()

_SUSPECT = f"""
                          claims > {ISOLATE_FROM_CLAIM}
                          OR claims > 1 AND (%(results)s::jsonb @> '[{{"status": "unknown"}}]' OR EXISTS (
                              SELECT FROM tool_effects WHERE turn_id = %(turn_id)s AND status = 'unknown'))
""".strip()

# Commits one step: appends messages, and writes changed working variables and the intents or results of tool calls. The
# condition on the tick makes a repeated commit a no-op. `strikes = 1`: the present claim counts as the first attempt at
# the next step, so that a tool that kills its process has used one attempt. The step also ends the suspicion that the
# turn kills its processes (`claims`, `deaths`), unless the outcome of one of its calls is unknown: a model may call
# such a tool again after each crash, and each of these replies is a step. A turn in a process of its own stays suspect
# until it is settled: its process may hang or die after each step. `paced = false`: the model has answered (see
# `lease.queries.RETURNED`).
STEP = Statement(
    "turns.step",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET message_count = message_count + %(added)s,
            tick = tick + 1,
            state = CASE WHEN %(asks)s THEN {sql(Trigger.TOOL_REQUESTED)} ELSE {sql(Trigger.TOOL_RESULT)} END,
            strikes = 1,
            claims = CASE WHEN {_SUSPECT} THEN claims ELSE 1 END,
            deaths = CASE WHEN {_SUSPECT} THEN deaths ELSE 0 END,
            unequipped_since = NULL,
            paced = false,
            spent_s = %(spent_s)s,
            variables_tick = {NEXT_VARIABLES_TICK},
            lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
        WHERE {HELD} AND tick = %(tick)s
        RETURNING session_id, token, tick, message_count - %(added)s AS base
    ), {_WITH_MESSAGES}, intended AS (
        INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,
                                  waits_for, approver, intended_at, decide_at)
        SELECT e.effect_id, %(turn_id)s::uuid, fenced.base + %(added)s, e.position, e.tool, e.arguments, e.effect,
               e.status, e.waits_for, e.approver, perdure_now(), perdure_now() + make_interval(secs => e.timeout_s)
        FROM fenced, jsonb_to_recordset(%(intents)s::jsonb) AS e (
            effect_id uuid, position int, tool text, arguments text, effect text, status text, waits_for text,
            approver text, timeout_s double precision)
    ), finished AS (
        UPDATE tool_effects AS t
        SET status = r.status, result = r.result, variables = NULL,
            finished_at = CASE WHEN r.status <> 'unknown' THEN perdure_now() END,
            probe_at = CASE WHEN r.status = 'unknown' AND t.waits_for = 'task' OR t.parts IS NOT NULL
                            THEN perdure_now() END  -- the sweeper revokes its tasks
        FROM fenced, jsonb_to_recordset(%(results)s::jsonb) AS r (effect_id uuid, status text, result text)
        WHERE t.effect_id = r.effect_id AND t.turn_id = %(turn_id)s
    ), {WITH_STEP.strip()}
    SELECT fenced.base, (SELECT cancel_requested_at FROM turns WHERE turn_id = %(turn_id)s) AS cancel_requested_at
    FROM fenced
    """,
)

# Settles a turn: writes its last messages, its outcome and its delivery. Releases the session, unless `keep` is set and
# the session has more turns. `unsettled` is read from the locked row, so that a concurrently accepted turn is counted.
# `saved`: the snapshot store already has the snapshot of the tick that this statement commits. Inserts a row for each
# use of a case, and locks no case. `tick`, if not null, must equal the session's tick, so that a repeated statement has
# no effect.
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
            lease_owner = CASE WHEN %(keep)s AND unsettled > 1 THEN lease_owner END
        WHERE {HELD} AND tick = coalesce(%(tick)s::bigint, tick)
        RETURNING session_id, user_id, scope, token, tick, message_count - %(added)s AS base, unsettled,
                  end_requested_at, lease_until
    ), {_WITH_MESSAGES}, settled AS (
        UPDATE turns AS t
        SET status = %(status)s, steps = %(steps)s, usage = %(usage)s::jsonb, settled_at = perdure_now(),
            settled_tick = fenced.tick, held = NULL, held_error = NULL,
            error_code = %(error_code)s, error_message = %(error_message)s,
            reply_seq = CASE WHEN %(replied)s THEN fenced.base + %(added)s END
        FROM fenced WHERE t.turn_id = %(turn_id)s
        RETURNING t.turn_id, t.reply_to, fenced.user_id, fenced.scope
    ), doubtful AS (
        UPDATE tool_effects AS e
        SET status = CASE e.status WHEN 'intended' THEN 'unknown' WHEN 'asked' THEN 'denied' ELSE 'failed' END,
            probe_at = CASE WHEN e.status = 'intended' AND e.waits_for = 'task' THEN perdure_now() END  -- to revoke
        FROM fenced WHERE e.turn_id = %(turn_id)s AND e.status IN ('intended', 'asked', 'approved')
    ), {WITH_STEP.strip()}, {WITH_USES.strip()}, owed AS (
        INSERT INTO deliveries (delivery_id, turn_id, user_id, scope, target, status, due_at, created_at)
        SELECT %(delivery_id)s::uuid, turn_id, user_id, scope, reply_to, 'pending', perdure_now(), perdure_now()
        FROM settled WHERE reply_to IS NOT NULL
        ON CONFLICT DO NOTHING  -- a release before 0030 may route a message that is refused concurrently
        RETURNING delivery_id
    )
    SELECT fenced.unsettled, fenced.unsettled = 0 AND fenced.end_requested_at IS NOT NULL AS may_end,
           (SELECT delivery_id FROM owed) AS delivery_id,
           fenced.lease_until IS NULL AND EXISTS (
               SELECT FROM sessions AS q
               WHERE q.user_id = fenced.user_id AND q.unsettled > 0 AND q.queued_at IS NOT NULL) AS others_wait
    FROM fenced
    """,
)

# The content that settling adds to the transcript: the user's messages that the transcript does not have yet, and the
# results of open calls. Of the stored JSON, this statement reads only the ids of the calls and the token counts. So a
# turn can be settled even if this release cannot parse its rows.
REMAINS = Statement(
    "turns.remains",
    """
    SELECT (SELECT coalesce(json_agg(json_build_object('message_id', i.message_id, 'text', i.text,
                                                       'accepted_at', i.accepted_at) ORDER BY i.position), '[]')
            FROM inbox AS i
            WHERE i.turn_id = %(turn_id)s
              AND NOT EXISTS (SELECT FROM messages WHERE session_id = %(session_id)s AND seq = %(first_seq)s)
           ) AS uncommitted,
           (SELECT coalesce(json_agg(json_build_object('id', coalesce(c.call ->> 'id', ''), 'status', e.status,
                                                       'result', e.result) ORDER BY c.number), '[]')
            FROM (SELECT turn_id, seq, tool_calls FROM messages
                  WHERE session_id = %(session_id)s ORDER BY seq DESC LIMIT 1) AS last
                 CROSS JOIN jsonb_array_elements(CASE jsonb_typeof(last.tool_calls) WHEN 'array' THEN last.tool_calls
                                                      ELSE '[]' END) WITH ORDINALITY AS c (call, number)
                 LEFT JOIN tool_effects AS e
                   ON e.turn_id = last.turn_id AND e.message_seq = last.seq AND e.position = c.number - 1
            WHERE last.turn_id = %(turn_id)s
           ) AS open_calls,
           said.steps,
           CASE WHEN said.steps = 0 OR said.input_tokens IS NOT NULL OR said.output_tokens IS NOT NULL
                THEN jsonb_build_object('input_tokens', coalesce(said.input_tokens, 0),
                                        'output_tokens', coalesce(said.output_tokens, 0)) END AS usage
    FROM (SELECT count(*) AS steps,
                 sum(CASE jsonb_typeof(usage -> 'input_tokens') WHEN 'number'
                     THEN (usage ->> 'input_tokens')::numeric END)::bigint AS input_tokens,
                 sum(CASE jsonb_typeof(usage -> 'output_tokens') WHEN 'number'
                     THEN (usage ->> 'output_tokens')::numeric END)::bigint AS output_tokens
          FROM messages
          WHERE session_id = %(session_id)s AND seq >= %(first_seq)s AND turn_id = %(turn_id)s AND role = 'assistant'
         ) AS said
    """,
    writes=False,
)

# Commits a turn's verdict in `turns.held`, which callers of the API do not see. The worker saves the snapshot next, and
# then runs SETTLE. Returns the session's queued messages, which are the snapshot's pending events. `strikes` is reset
# only if no verdict was held before, because holding the same verdict again is no progress.
HOLD = Statement(
    "turns.hold",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET strikes = CASE WHEN EXISTS (SELECT FROM turns WHERE turn_id = %(turn_id)s AND held IS NOT NULL)
                           THEN strikes ELSE 1 END,
            lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
        WHERE {HELD}
        RETURNING tick
    ), held AS (
        UPDATE turns SET held = coalesce(held, %(held)s::json) FROM fenced WHERE turn_id = %(turn_id)s
    )
    SELECT fenced.tick, {pending("%(session_id)s", "%(most)s")} AS pending FROM fenced
    """,
)

# Returns a row if the session still has the caller's fence.
OWNED = Statement(
    "turns.owned",
    f"SELECT token FROM sessions WHERE {HELD}",
    writes=False,
)
