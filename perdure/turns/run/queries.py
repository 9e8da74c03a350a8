"""The statements of a running turn: its steps, and what settling it needs to read."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import HELD
from perdure.database.keyed import keyed
from perdure.sessions.states import Trigger, sql
from perdure.snapshots.queries import NEXT_VARIABLES_TICK, WITH_STEP, pending
from perdure.turns.calls.queries import sum_of
from perdure.turns.lease.leave_queries import WITH_MESSAGES
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from perdure.turns.transcript import as_heard

_SUSPECT = f"""
                          claims > {ISOLATE_FROM_CLAIM}
                          OR claims > 1 AND (%(results)s::jsonb @> '[{{"status": "unknown"}}]' OR EXISTS (
                              SELECT FROM tool_effects WHERE turn_id = %(turn_id)s AND status = 'unknown'))
""".strip()

# The waiting turns `t` whose messages may join the turn that runs (`r`): those of the same agent, channel,
# receiver and additions.
_STEERING = """
        FROM turns AS t JOIN turns AS r ON r.turn_id = %(turn_id)s
        WHERE t.session_id = %(session_id)s AND t.settled_at IS NULL AND t.status = 'accepted' AND t.steers
          AND t.agent = r.agent AND t.channel = r.channel AND t.reply_to IS NOT DISTINCT FROM r.reply_to
          AND t.additions IS NOT DISTINCT FROM r.additions
          AND r.cancel_requested_at IS NULL
""".strip()

# The turns that join, and their messages, in the order of acceptance: as many as the turn's texts together may have
# characters. The session's row is locked before the turns' rows, in the order of all statements that change them.
_JOINING = f"""
    locked AS (
        SELECT session_id FROM sessions WHERE {HELD} AND tick = %(tick)s FOR NO KEY UPDATE
    ), steering AS (
        SELECT t.turn_id, t.seq, t.priority, t.metadata {_STEERING} AND EXISTS (SELECT FROM locked)
        FOR UPDATE OF t, r  -- so that a cancellation that this statement has waited for is seen
    ), joining AS (
        SELECT turn_id, seq, priority, metadata FROM (
            SELECT s.*, sum((SELECT sum(length(text)) FROM inbox WHERE turn_id = s.turn_id)) OVER (ORDER BY s.seq)
                   + (SELECT sum(length(text)) FROM inbox WHERE turn_id = %(turn_id)s) AS chars
            FROM steering AS s) AS counted
        WHERE chars <= %(max_chars)s
    ), heard AS (
        SELECT i.*, row_number() OVER (ORDER BY j.seq, i.position)::int AS number
        FROM joining AS j JOIN inbox AS i USING (turn_id)
    )
""".strip()

# The messages that join enter the transcript after the step's own, and their rows of the inbox move to the turn. Their
# own turns are deleted: the ids lead to the turn (`unrouted.routed_to`), as that of any message that joined another.
_JOINED = """
    spoken AS (
        INSERT INTO messages (session_id, seq, turn_id, role, content, message_id, channel, token_count, parts,
                              created_at)
        SELECT fenced.session_id, fenced.base + %(added)s + h.number, %(turn_id)s::uuid, 'user', h.text, h.message_id,
               %(channel)s, octet_length(h.text) / 3 + 4 + coalesce((
                   SELECT sum((part ->> 'tokens')::int) FROM jsonb_array_elements(h.parts) AS part), 0),
               h.parts, h.accepted_at
        FROM fenced, heard AS h
    ), moved AS (
        UPDATE inbox AS i
        SET turn_id = %(turn_id)s::uuid,
            position = h.number + (SELECT max(position) FROM inbox WHERE turn_id = %(turn_id)s)
        FROM fenced, heard AS h
        WHERE i.user_id = h.user_id AND i.channel = h.channel AND i.message_id = h.message_id
    ), told AS (
        UPDATE turns AS t
        SET priority = greatest(t.priority, (SELECT max(priority) FROM joining)),
            metadata = CASE WHEN brought.metadata IS NULL THEN t.metadata
                            ELSE coalesce(t.metadata, '{}') || brought.metadata END
        FROM fenced, (SELECT jsonb_object_agg(key, value ORDER BY seq) AS metadata
                      FROM joining, jsonb_each(metadata)) AS brought
        WHERE t.turn_id = %(turn_id)s AND EXISTS (SELECT FROM joining)
        RETURNING t.metadata
    ), gone AS (
        DELETE FROM turns AS t USING fenced, joining AS j WHERE t.turn_id = j.turn_id
        RETURNING t.turn_id, t.user_id, t.accepted_at
    ), known AS (
        INSERT INTO unrouted (turn_id, user_id, message, accepted_at, routed_to, settled_at)
        SELECT gone.turn_id, gone.user_id, jsonb_build_object('channel', h.channel, 'message_id', h.message_id),
               gone.accepted_at, %(turn_id)s::uuid, perdure_now()
        FROM gone JOIN heard AS h ON h.turn_id = gone.turn_id AND h.position = 1
    ), followed AS (
        UPDATE unrouted AS u SET routed_to = %(turn_id)s::uuid
        FROM gone WHERE u.user_id = gone.user_id AND u.routed_to = gone.turn_id
    )
""".strip()


_HEARD = "+ joined.messages, unsettled = unsettled - joined.turns"

_NUMBERS = "FROM (SELECT count(*) AS messages, count(DISTINCT turn_id) AS turns FROM heard) AS joined"

_TOLD = f"""
           (SELECT {as_heard("text", "accepted_at", "number")} FROM heard) AS joined,
           (SELECT metadata FROM told) AS metadata
""".strip()

# No message waits that could join.
_UNSTEERED = f"AND NOT (%(joins)s AND unsettled > 1 AND EXISTS (SELECT {_STEERING}))"


# Commits one step: appends messages, and writes changed working variables and the intents or results of tool calls. The
# condition on the tick makes a repeated commit a no-op. `strikes = 1`: the present claim counts as the first attempt at
# the next step, so that a tool that kills its process has used one attempt. The step also ends the suspicion that the
# turn kills its processes (`claims`, `deaths`), unless the outcome of one of its calls is unknown: a model may call
# such a tool again after each crash, and each of these replies is a step. A turn in a process of its own stays suspect
# until it is settled: its process may hang or die after each step. `paced = false`: the model has answered (see
# `lease.queries.RETURNED`).
def _step(name: str, session: str = "", also: str = "", *, joins: bool = False) -> Statement:
    """A statement that commits a step, and the CTEs `also`. `joins`: it also takes in the messages that steer."""
    return Statement(
        f"turns.{name}",
        f"""
    WITH {f"{_JOINING}, " if joins else ""}fenced AS (
        UPDATE sessions
        SET {session}message_count = message_count + %(added)s {_HEARD if joins else ""},
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
        {_NUMBERS if joins else ""}
        WHERE {HELD} AND tick = %(tick)s {"" if joins else _UNSTEERED}
        RETURNING session_id, user_id, scope, token, tick,
                  message_count - %(added)s {"- joined.messages" if joins else ""} AS base
    ), {WITH_MESSAGES}{f", {_JOINED}" if joins else ""}, intended AS (
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
            probe_at = CASE WHEN t.status <> 'intended' THEN t.probe_at END  -- as CLOSE_CALL has set it
        FROM fenced, jsonb_to_recordset(%(results)s::jsonb) AS r (effect_id uuid, status text, result text)
        WHERE t.effect_id = r.effect_id AND t.turn_id = %(turn_id)s
    ), {WITH_STEP.strip()}{also}
    SELECT fenced.base, (SELECT cancel_requested_at FROM turns WHERE turn_id = %(turn_id)s) AS cancel_requested_at,
           {_TOLD if joins else "NULL AS joined"}
    FROM fenced
    """,
    )


STEP = _step("step")

# A step that makes `agent` the agent of the session, of the turn, and of the queued turns of the agent before. The
# stored instructions were those of the agent before.
STEP_HANDING_OFF = _step(
    "step_handing_off",
    "agent = %(agent)s, ",
    """, handed AS (
        UPDATE turns AS t
        SET agent = %(agent)s, instructions = CASE WHEN t.turn_id = %(turn_id)s THEN NULL ELSE t.instructions END,
            fingerprint = CASE WHEN t.turn_id = %(turn_id)s THEN %(fingerprint)s END
        FROM fenced, (SELECT agent FROM turns WHERE turn_id = %(turn_id)s) AS before
        WHERE t.session_id = %(session_id)s AND t.settled_at IS NULL
          AND (t.turn_id = %(turn_id)s OR t.agent = before.agent AND t.status = 'accepted')
    )""",
)

# Run if STEP returned no row for a step that may take messages in (`joins`): one waits, or the session was lost. So a
# turn that nobody steers pays for none of it.
STEP_JOINING = _step("step_joining", joins=True)

# Also removes the text that a hook has changed: the message's text from the inbox, where `message_id` still recognizes
# a repeated message, and the title that the conversation had from it.
STEP_REPLACED = _step(
    "step_replaced",
    also=""", forgotten AS (
        UPDATE inbox SET text = '' FROM fenced WHERE turn_id = %(turn_id)s
    ), retitled AS (
        UPDATE conversations AS c SET title = %(title)s
        FROM fenced
        WHERE c.user_id = fenced.user_id AND c.conversation = substr(fenced.scope, 2)
          AND NOT c.titled AND c.title = %(former_title)s
    )""",
)

# What STEP returned of the messages that joined the turn, if its result was lost. `after` is the `seq` of the step's
# last own message.
JOINED = Statement(
    "turns.joined",
    f"""
    SELECT {as_heard("content", "created_at", "seq")} AS joined,
           (SELECT metadata FROM turns WHERE turn_id = %(turn_id)s) AS metadata
    FROM messages WHERE session_id = %(session_id)s AND turn_id = %(turn_id)s AND seq > %(after)s
    """,
    writes=False,
)


# The content that settling adds to the transcript: the user's messages that the transcript does not have yet, and the
# results of open calls. Of the stored JSON, this statement reads only the ids of the calls and the token counts. So a
# turn can be settled even if this release cannot parse its rows.
REMAINS = Statement(
    "turns.remains",
    f"""
    SELECT (SELECT coalesce({as_heard("text", "accepted_at", "position")}, '[]')
            FROM inbox
            WHERE turn_id = %(turn_id)s
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
    FROM (SELECT count(*) FILTER (WHERE role = 'assistant') AS steps, {sum_of("input_tokens")} AS input_tokens,
                 {sum_of("output_tokens")} AS output_tokens, {sum_of("cached_tokens")} AS cached_tokens,
                 {sum_of("reasoning_tokens")} AS reasoning_tokens
          FROM messages
          WHERE session_id = %(session_id)s AND seq >= %(first_seq)s AND turn_id = %(turn_id)s
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

# Keeps what a model's server sent, for the operator.
NOTE_RECEIVED = Statement(
    "turns.note_received",
    f"""
    UPDATE turns SET attempt_error = %(received)s
    WHERE turn_id = %(turn_id)s AND {keyed("settled_at IS NULL")}
    RETURNING turn_id
    """,
)
