"""The statements of a running turn: its steps, and what settling it needs to read."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import HELD
from perdure.sessions.states import Trigger, sql
from perdure.snapshots.queries import NEXT_VARIABLES_TICK, WITH_STEP, pending
from perdure.turns.lease.claim import ISOLATE_FROM_CLAIM
from perdure.turns.lease.leave_queries import WITH_MESSAGES

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
            state = CASE WHEN %(runs_tools)s THEN {sql(Trigger.TOOL_REQUESTED)} ELSE {sql(Trigger.TOOL_RESULT)} END,
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
    ), {WITH_MESSAGES}, intended AS (
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


def _sum_of(count: str) -> str:
    """The sum of one count of the messages' usage; NULL if no message reports it."""
    number = f"CASE jsonb_typeof(usage -> '{count}') WHEN 'number' THEN (usage ->> '{count}')::numeric END"
    return f"sum({number})::bigint AS {count}"


# The content that settling adds to the transcript: the user's messages that the transcript does not have yet, and the
# results of open calls. Of the stored JSON, this statement reads only the ids of the calls and the token counts. So a
# turn can be settled even if this release cannot parse its rows.
REMAINS = Statement(
    "turns.remains",
    f"""
    SELECT (SELECT coalesce(json_agg(json_build_object('message_id', i.message_id, 'text', i.text, 'parts', i.parts,
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
                                        'output_tokens', coalesce(said.output_tokens, 0),
                                        'cached_tokens', said.cached_tokens,
                                        'reasoning_tokens', said.reasoning_tokens) END AS usage
    FROM (SELECT count(*) AS steps, {_sum_of("input_tokens")}, {_sum_of("output_tokens")},
                 {_sum_of("cached_tokens")}, {_sum_of("reasoning_tokens")}
          FROM messages
          WHERE session_id = %(session_id)s AND seq >= %(first_seq)s AND turn_id = %(turn_id)s AND role = 'assistant'
         ) AS said
    """,
    writes=False,
)

# Commits a turn's verdict in `turns.unsaved`, which callers of the API do not see. The worker saves the snapshot next,
# and then runs SETTLE. Returns the session's queued messages, which are the snapshot's pending events. `strikes` is
# reset only if no verdict was kept before, because keeping the same verdict again is no progress.
KEEP_UNSAVED = Statement(
    "turns.keep_unsaved",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET strikes = CASE WHEN EXISTS (SELECT FROM turns WHERE turn_id = %(turn_id)s AND unsaved IS NOT NULL)
                           THEN strikes ELSE 1 END,
            lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
        WHERE {HELD}
        RETURNING tick
    ), kept AS (
        UPDATE turns SET unsaved = coalesce(unsaved, %(verdict)s::json) FROM fenced WHERE turn_id = %(turn_id)s
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

# Stores the names of the tools that do not fit the turn's prompts.
LEAVE_OUT_TOOLS = Statement(
    "turns.leave_out_tools",
    f"""
    UPDATE turns SET tools_left_out = nullif(%(names)s::jsonb, '[]')
    WHERE turn_id = %(turn_id)s::uuid AND EXISTS (SELECT FROM sessions WHERE {HELD})
    """,
)

# Stores the instructions that a function of the agent made for the turn, and returns those stored first.
KEEP_INSTRUCTIONS = Statement(
    "turns.keep_instructions",
    f"""
    UPDATE turns SET instructions = coalesce(instructions, %(instructions)s)
    WHERE turn_id = %(turn_id)s::uuid AND EXISTS (SELECT FROM sessions WHERE {HELD})
    RETURNING instructions
    """,
)

INSTRUCTIONS = Statement(
    "turns.instructions",
    "SELECT instructions FROM turns WHERE turn_id = %(turn_id)s",
    writes=False,
)
