"""The statements of the sweeper, and those that cancel turns, read turns and record feedback."""

from __future__ import annotations

from perdure.access.tenants import OF_TENANT
from perdure.database.engine import Statement
from perdure.database.failures import WITH_FAILURE
from perdure.database.fencing import RAISED, UNLEASED
from perdure.database.keyed import keyed
from perdure.database.paging import sized
from perdure.sessions.queries import QUESTIONS
from perdure.sessions.states import Trigger, sql
from perdure.turns.calls.queries import NEW_ANSWER, STOPPED, below, each_row
from perdure.turns.lease.aging import HIGHEST, effective, levels
from perdure.turns.lease.leave_queries import WITH_DELIVERY
from perdure.turns.lease.queries import DRAINABLE, PARKED, PARKED_FOR

# Cancels a turn. A turn that has not begun is settled. For a turn that has begun, the request is recorded, and
# `not_before` is cleared, so that a waiting turn is due at once. The next turn does not inherit the time for which the
# cancelled one has waited for a worker with its agent. If the session has no other unsettled turn, the session becomes
# active, whatever state a crashed runner left behind. As with SETTLE, a session that answers a call of another agent
# (`depth`) ends with its turn.
CANCEL = Statement(
    "turns.cancel",
    f"""
    WITH locked AS (
        SELECT s.session_id, s.tick, s.scope, s.depth FROM sessions AS s
        WHERE s.session_id = (SELECT session_id FROM turns WHERE turn_id = %(turn_id)s)
        FOR NO KEY UPDATE
    ), asked AS (
        UPDATE turns AS t
        SET cancel_requested_at = coalesce(t.cancel_requested_at, perdure_now()),
            status = CASE WHEN t.status = 'accepted' THEN 'cancelled' ELSE t.status END,
            settled_at = CASE WHEN t.status = 'accepted' THEN perdure_now() END,
            settled_tick = CASE WHEN t.status = 'accepted' THEN locked.tick END,
            error_code = CASE WHEN t.status = 'accepted' THEN 'TURN_CANCELLED' END,
            error_message = CASE WHEN t.status = 'accepted' THEN %(message)s END
        FROM locked
        WHERE t.turn_id = %(turn_id)s AND {keyed("t.settled_at IS NULL")}
        RETURNING t.turn_id, t.session_id, t.user_id, locked.scope, locked.depth, t.status,
                  t.status = 'cancelled' AS settled,
                  NOT EXISTS (SELECT FROM turns AS earlier
                              WHERE earlier.session_id = t.session_id AND earlier.settled_at IS NULL
                                AND earlier.seq < t.seq) AS is_next,
                  t.reply_to, t.priority,
                  t.status = 'waiting_approval' OR t.status = 'parked' AND EXISTS (
                      SELECT FROM tool_effects AS e
                      WHERE e.turn_id = t.turn_id AND e.status = 'intended' AND e.waits_for IS NOT NULL) AS waits
    ), released AS (
        UPDATE sessions AS s
        SET unsettled = s.unsettled - asked.settled::int, turn_count = s.turn_count + asked.settled::int,
            last_activity_at = CASE WHEN asked.settled THEN perdure_now() ELSE s.last_activity_at END,
            not_before = CASE WHEN asked.settled AND s.unsettled > 1 THEN s.not_before END,
            queued_at = CASE WHEN asked.settled AND s.unsettled > 1 THEN s.queued_at END,
            unequipped_since = CASE WHEN NOT (asked.settled AND asked.is_next) THEN s.unequipped_since END,
            state = CASE WHEN asked.settled AND s.unsettled = 1
                         THEN {sql(Trigger.TURN_STOPPED, column="s.state")} ELSE s.state END,
            end_requested_at = CASE WHEN asked.settled AND s.depth > 0 THEN coalesce(s.end_requested_at, perdure_now())
                                    ELSE s.end_requested_at END
        FROM asked WHERE s.session_id = asked.session_id  -- in any state: the turn may be parked concurrently
        RETURNING asked.settled AND s.unsettled = 0 AND s.end_requested_at IS NOT NULL AS may_end
    ), {WITH_DELIVERY.format(turns="asked WHERE settled AND reply_to IS NOT NULL")}
    SELECT asked.session_id, asked.status, asked.priority, asked.waits, asked.depth > 0 AS answers_call,
           (SELECT delivery_id FROM owed) AS delivery_id,
           coalesce((SELECT may_end FROM released), false) AS may_end
    FROM asked
    """,
)

# Raises the fence of a session that no worker holds, so that the caller can settle the session's waiting turn.
SEIZE_WAITING = Statement(
    "turns.seize_waiting",
    f"""
    UPDATE sessions AS s SET {RAISED}, strikes = 0, claims = 0, not_before = NULL, queued_at = NULL
    WHERE session_id = %(session_id)s AND lease_until IS NULL
    RETURNING token, nonce
    """,
)

# The worker whose statement moves `due_at` ahead runs this round of the sweeper. A worker attempts once per interval,
# so it may take a round a little early: otherwise an attempt a millisecond before `due_at` would skip the round.
TAKE_SWEEP = Statement(
    "sweep.take",
    """
    INSERT INTO sweeps AS s (name, due_at)
    VALUES (%(name)s, perdure_now() + make_interval(secs => %(every_s)s))
    ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at
    -- A later `due_at` was written while the clock was ahead. Within 1 s, two rounds merely committed out of order.
    WHERE s.due_at <= perdure_now() + make_interval(secs => least(%(every_s)s::float / 5, 1))
       OR s.due_at > excluded.due_at + interval '1 second'
    RETURNING s.name, s.paces
    """,
)

# The seconds for which a session that was woken `level` times has been due.
_DUE_FOR = """
    extract(epoch FROM perdure_now() - {since})::float - CASE level WHEN 0 THEN 0 ELSE %(backoff_s)s * 2 ^ level END
""".strip()

_FIRST = f"""
    least(priority + aged, {HIGHEST}) DESC, CASE WHEN aged > 0 AND priority + aged >= {HIGHEST} THEN 0 ELSE wakes END,
    since
""".strip()

# Since when a due session waits for a worker: since the end of another wait, or since its turn was accepted.
_WAITS_SINCE = """
    coalesce(due.began, (SELECT accepted_at FROM turns
                         WHERE turns.session_id = due.session_id AND settled_at IS NULL ORDER BY seq LIMIT 1),
             perdure_now())
""".strip()

# Wakes sessions that have unsettled turns and that no worker holds. A session is due `backoff_s` seconds after its last
# wake-up. The pause doubles with each wake-up after which no worker claimed the session (`wakes`). The order is by
# effective priority, which grows while a session is due (`aging`), then fewest wake-ups, then longest wait. A session
# that its wait has raised to the highest priority is ordered by its wait alone, so that no number of newer sessions can
# delay it further. The published priority counts the whole wait since the turn was accepted.
#
# `ready` has the sessions whose turn may run; if `drained`, without those that any drain takes. `waiting` has the
# sessions whose turn waited until `not_before`, for example for a person or a model. Their wait is counted from
# `not_before`. Of the sessions that wait for a model (`parked`), it returns only as many as `paces` has for this
# model, or `most_paced`, so that a recovered model is not overloaded. A session that was returned but not claimed
# (`wakes > 0`) is woken again without this limit: it counts among the returned ones already, and if its wake-up is
# lost, only another one makes room again. `marked` sets `not_before` to the present time, so that a worker can claim
# the session.
#
# Each pair of a priority and a `level` (`wakes`, but at most 6) is one range of `sessions_due_idx`. A range is read in
# index order up to the limit. The limit is a subquery, so that the planner does not know the number. If the planner
# knew the number and expected fewer rows than that in a range, it might read and sort the whole range. A timestamp in
# the future was written while the server's clock was ahead, and counts as past.
WAKE_DUE = Statement(
    "sweep.wake_due",
    f"""
    WITH RECURSIVE models (model) AS (
        SELECT min({PARKED_FOR}) FROM sessions WHERE {PARKED}
        UNION ALL
        SELECT (SELECT min({PARKED_FOR}) FROM sessions WHERE {PARKED} AND {PARKED_FOR} > models.model)
        FROM models WHERE models.model IS NOT NULL
    ), ready AS (
        SELECT found.session_id, rank AS priority, found.wakes, found.since, found.idle_since, level
        FROM generate_series(0, 9) AS rank, generate_series(0, 6) AS level, LATERAL (
            (SELECT session_id, wakes, coalesce(woken_at, '-infinity') AS since,
                    coalesce(woken_at, last_activity_at) AS idle_since FROM sessions
             WHERE unsettled > 0 AND not_before IS NULL AND priority = rank AND least(wakes, 6) = level
               AND coalesce(woken_at, '-infinity')
                   <= perdure_now() - make_interval(secs => %(backoff_s)s * 2 ^ level)
               AND {UNLEASED} AND NOT (%(drained)s AND {DRAINABLE})
             ORDER BY coalesce(woken_at, '-infinity') LIMIT (SELECT %(most)s::bigint))
            UNION ALL
            (SELECT session_id, wakes, '-infinity', perdure_now() FROM sessions
             WHERE unsettled > 0 AND not_before IS NULL AND priority = rank AND least(wakes, 6) = level
               AND coalesce(woken_at, '-infinity') > perdure_now() + interval '1 second'
               AND {UNLEASED}
             ORDER BY coalesce(woken_at, '-infinity') LIMIT (SELECT %(most)s::bigint))) AS found
    ), waiting AS (
        SELECT each.*, level FROM generate_series(0, 6) AS level, LATERAL (
            SELECT session_id, priority, wakes, not_before AS since FROM sessions
            WHERE unsettled > 0 AND not_before IS NOT NULL AND NOT paced AND least(wakes, 6) = level
              AND not_before <= perdure_now()
                  - make_interval(secs => CASE level WHEN 0 THEN 0 ELSE %(backoff_s)s * 2 ^ level END)
              AND {UNLEASED}
            ORDER BY not_before LIMIT (SELECT %(most)s::bigint)) AS each
    ), parked AS (
        SELECT found.*, models.model FROM models, LATERAL (
            SELECT each.*, level FROM generate_series(0, 6) AS level, LATERAL (
                SELECT session_id, priority, wakes, not_before AS since FROM sessions
                WHERE {PARKED} AND {PARKED_FOR} = models.model AND least(wakes, 6) = level
                  AND not_before <= perdure_now()
                      - make_interval(secs => CASE level WHEN 0 THEN 0 ELSE %(backoff_s)s * 2 ^ level END)
                  AND {UNLEASED}
                ORDER BY not_before
                LIMIT CASE level WHEN 0 THEN least(coalesce((%(paces)s::jsonb ->> models.model)::int,
                                                            %(most_paced)s::int), %(most)s::int)
                                 ELSE %(most)s::int END) AS each
            ORDER BY each.wakes, each.since LIMIT (SELECT %(most)s::bigint)
        ) AS found
        WHERE models.model IS NOT NULL
    ), found AS (
        SELECT session_id, priority, wakes, since, NULL::text AS model, NULL::timestamptz AS began,
               {levels(_DUE_FOR.format(since="idle_since"))} AS aged FROM ready
        UNION ALL
        SELECT session_id, priority, wakes, since, NULL, since, {levels(_DUE_FOR.format(since="since"))} FROM waiting
        UNION ALL
        SELECT session_id, priority, wakes, since, model, NULL, {levels(_DUE_FOR.format(since="since"))} FROM parked
        UNION ALL
        (SELECT session_id, priority, wakes, '-infinity', CASE WHEN paced THEN {PARKED_FOR} END, perdure_now(), 0
         FROM sessions
         WHERE unsettled > 0 AND not_before IS NOT NULL
           AND woken_at > perdure_now() + interval '1 second' AND not_before > perdure_now()
         ORDER BY woken_at LIMIT (SELECT %(most)s::bigint))
    ), due AS (
        SELECT * FROM found ORDER BY {_FIRST} LIMIT %(most)s
    ), locked AS (
        SELECT session_id FROM sessions WHERE session_id = ANY (ARRAY(SELECT session_id FROM due))
        FOR NO KEY UPDATE SKIP LOCKED
    ), marked AS (
        UPDATE sessions
        SET woken_at = perdure_now(), wakes = wakes + 1,
            not_before = CASE WHEN not_before IS NOT NULL THEN perdure_now() END
        WHERE session_id = ANY (ARRAY(SELECT session_id FROM locked))
        RETURNING session_id
    )
    SELECT session_id, {effective("priority", _WAITS_SINCE)} AS priority, model
    FROM due JOIN marked USING (session_id) ORDER BY {_FIRST}
    """,
)

NOW = Statement("sweep.now", "SELECT perdure_now() AS now", writes=False)

# Of the sessions for which the sweeper has published wake-ups, those that no worker has taken: since `asked_at`, the
# time of the publication, no worker has claimed, postponed or released them.
UNTAKEN = Statement(
    "sweep.untaken",
    f"""
    SELECT session_id FROM sessions
    WHERE session_id = ANY (%(session_ids)s::uuid[]) AND woken_at <= %(asked_at)s::timestamptz AND {UNLEASED}
      AND (unsettled > 0 OR end_requested_at IS NOT NULL AND ended_at IS NULL)
    """,
    writes=False,
)

# Undoes wake-ups that the broker refused: the sessions are due in the next round.
UNWAKE = Statement(
    "sweep.unwake",
    """
    WITH unlocked AS (
        SELECT session_id FROM sessions
        WHERE session_id = ANY (%(session_ids)s::uuid[]) AND woken_at IS NOT NULL
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE sessions AS s SET woken_at = NULL, wakes = greatest(wakes - 1, 0)
    FROM unlocked WHERE s.session_id = unlocked.session_id
    """,
)

# Postpones a session whose wake-up reached a worker without a free slot. The wake-up counts in `wakes`, so that the
# sweeper wakes other sessions first. The limit `most_wakes` keeps the pause short, so that a slot is used soon after it
# becomes free.
CROWDED = Statement(
    "sweep.crowded",
    """
    UPDATE sessions SET woken_at = perdure_now(), wakes = least(greatest(wakes, 1), %(most_wakes)s)
    WHERE session_id = %(session_id)s
    """,
)

# A call `e` of the turn `t`, which the message `m` requests, as members of the turn's body.
_CALL = "'call_id', m.tool_calls -> e.position ->> 'id', 'tool', e.tool"

_OF_CALLS = """
                FROM tool_effects AS e JOIN messages AS m ON m.session_id = t.session_id AND m.seq = e.message_seq
                WHERE e.turn_id = t.turn_id
""".strip()

_TURN = f"""
    SELECT t.turn_id, t.session_id, t.seq, t.user_id, t.status, t.attempts,
           CASE WHEN t.settled_at IS NULL AND t.first_seq IS NOT NULL THEN (
                SELECT count(*) FROM messages AS m
                WHERE m.session_id = t.session_id AND m.seq >= t.first_seq AND m.role = 'assistant')
                ELSE t.steps END AS steps,
           t.steps AS steps_when_parked,
           CASE WHEN t.status = 'parked' THEN (
                SELECT not_before FROM sessions
                WHERE session_id = t.session_id AND queued_at IS NULL) END AS not_before,
           r.content AS reply, r.stop_reason, t.error_code, t.error_message, t.usage, t.data, t.channel, t.agent,
           t.metadata, t.tools_left_out,
           CASE WHEN t.attempts > 1 THEN CASE WHEN t.attempt_error IS NULL THEN 'worker_lost' ELSE 'error' END END
               AS resumed,
           CASE WHEN t.status = 'waiting_approval' THEN (
                SELECT jsonb_agg(jsonb_build_object({_CALL}, 'arguments', e.arguments, 'expires_at', e.decide_at,
                                                    'approver', e.approver)
                                 ORDER BY e.position)
                {_OF_CALLS} AND {keyed("e.status = 'asked'")} AND e.decide_at > perdure_now()
                  AND (SELECT end_requested_at IS NULL FROM sessions WHERE session_id = t.session_id))
                END AS pending_approvals,
           CASE WHEN t.status IN ('parked', 'waiting_approval') THEN (
                SELECT jsonb_agg(jsonb_build_object({_CALL}, 'arguments', e.arguments, 'expires_at', e.decide_at,
                                                    'metadata', e.payload -> 'metadata')
                                 ORDER BY e.position)
                {_OF_CALLS} AND e.status = 'intended' AND e.waits_for = 'client')
                END AS pending_calls,
           (SELECT jsonb_agg(jsonb_build_object({_CALL},
                                                'decision', CASE e.status WHEN 'denied' THEN 'deny' ELSE 'approve' END,
                                                'decided_by', e.decided_by, 'decided_at', e.decided_at)
                             ORDER BY e.message_seq, e.position)
            {_OF_CALLS} AND {keyed("e.decided_by IS NOT NULL")}) AS decisions,
           CASE WHEN t.status = 'parked' THEN (
                SELECT jsonb_build_object('kind', e.waits_for, 'name', e.tool, 'until', e.decide_at,
                                          'progress', e.progress, 'call_id', m.tool_calls -> e.position ->> 'id')
                       || CASE WHEN e.waits_for = 'user' THEN jsonb_build_object(
                              'arguments', e.arguments,
                              'asked', coalesce((e.payload ->> 'judged')::int, 0) + 1,
                              'problem', e.payload ->> 'problem') ELSE '{{}}' END
                {_OF_CALLS} AND e.status = 'intended' AND e.waits_for IS NOT NULL
                  AND NOT (e.waits_for = 'user' AND {NEW_ANSWER})
                ORDER BY e.waits_for <> 'user', CASE WHEN e.waits_for = 'user' THEN NULL ELSE e.decide_at END,
                         e.position LIMIT 1) END AS waiting_for,
           (SELECT e.turn_id FROM tool_effects AS e
            WHERE e.effect_id = t.turn_id AND e.waits_for = 'agent') AS parent_turn_id,
           (SELECT jsonb_agg(jsonb_build_object({_CALL},
                                                'turn_id', c.turn_id, 'agent', c.agent, 'status', c.status)
                             ORDER BY e.message_seq, e.position)
            FROM tool_effects AS e JOIN turns AS c ON c.turn_id = e.effect_id
            JOIN messages AS m ON m.session_id = t.session_id AND m.seq = e.message_seq
            WHERE e.turn_id = t.turn_id AND e.waits_for = 'agent') AS children,
           t.accepted_at, t.started_at, t.settled_at
    FROM turns AS t LEFT JOIN messages AS r ON r.session_id = t.session_id AND r.seq = t.reply_seq
"""

READ = Statement("turns.read", _TURN + " WHERE t.turn_id = %(turn_id)s", writes=False)

# What the agents need or needed from a person that answer the calls of a turn, or those of one another: for each call,
# the member of the turn's body to which it belongs. The calls are named as FIND_CALL finds them.
READ_BELOW = Statement(
    "turns.read_below",
    f"""
    SELECT found.member, jsonb_build_object('call_id', e.effect_id, 'turn_id', q.turn_id, 'agent', q.agent)
                         || found.item AS item
    FROM ({below("%(turn_id)s::uuid", all_calls=True)}) AS below {each_row("turns", "turn_id = below.turn_id", "q")}
    {each_row("tool_effects", "turn_id = q.turn_id", "e")}
    CROSS JOIN LATERAL (VALUES
        ('pending_approvals',
         q.status = 'waiting_approval' AND e.status = 'asked' AND e.decide_at > perdure_now(),
         jsonb_build_object('tool', e.tool, 'arguments', e.arguments, 'approver', e.approver,
                            'expires_at', least(e.decide_at, below.until))),
        ('pending_calls',
         q.status IN ('parked', 'waiting_approval') AND e.status = 'intended' AND e.waits_for = 'client',
         jsonb_build_object('tool', e.tool, 'arguments', e.arguments, 'metadata', e.payload -> 'metadata',
                            'expires_at', least(e.decide_at, below.until))),
        ('waiting_for',
         q.status = 'parked' AND e.status = 'intended' AND e.waits_for = 'user' AND NOT {NEW_ANSWER},
         jsonb_build_object('kind', 'user', 'name', e.tool, 'until', least(e.decide_at, below.until), 'progress', NULL,
                            'arguments', e.arguments, 'problem', e.payload ->> 'problem',
                            'asked', coalesce((e.payload ->> 'judged')::int, 0) + 1)),
        ('decisions',
         e.decided_by IS NOT NULL,
         jsonb_build_object('tool', e.tool, 'decision', CASE e.status WHEN 'denied' THEN 'deny' ELSE 'approve' END,
                            'decided_by', e.decided_by, 'decided_at', e.decided_at))
    ) AS found (member, holds, item)
    WHERE q.turn_id <> %(turn_id)s AND found.holds AND (below.is_open OR found.member = 'decisions')
    ORDER BY e.intended_at, e.message_seq, e.position, e.effect_id
    """,
    writes=False,
)


def _list(name: str, chosen: str, order: str = "t.turn_id") -> Statement:
    """A statement that lists the turns of the query `chosen`: the newest first, at most `limit`.

    `order` is an indexed column that increases with each turn.
    """
    return Statement(
        f"turns.{name}",
        f"""
        {chosen} AND (%(status)s::text IS NULL OR t.status = %(status)s)
        AND (%(user_id)s::text IS NULL OR t.user_id = %(user_id)s)
        ORDER BY {order} DESC LIMIT %(limit)s
        """,
        writes=False,
    )


_LISTED = """
    SELECT t.turn_id, t.session_id, t.user_id, t.seq, t.status, t.agent, t.channel, t.attempts,
           CASE WHEN t.settled_at IS NOT NULL AND t.error_code IS NOT NULL
                THEN json_build_object('code', t.error_code, 'message', t.error_message) END AS error,
           t.accepted_at, t.started_at, t.settled_at
    FROM turns AS t
"""

LIST = _list("list", f"{_LISTED} WHERE true")

LIST_OF_USER = _list("list_of_user", f"{_LISTED} WHERE t.user_id = %(user_id)s")

LIST_OF_TENANT = _list("list_of_tenant", f"{_LISTED} WHERE {OF_TENANT.format(column='t.user_id')}")

LIST_OF_SESSION = _list("list_of_session", f"{_LISTED} WHERE t.session_id = %(session_id)s", "t.seq")

LIST_ERRORS = _list("list_errors", f"{_LISTED} WHERE t.error_code IS NOT NULL")

# MATERIALIZED prevents a backward scan over all turns, which would read many settled turns before it finds an old
# unsettled turn.
LIST_UNSETTLED = _list(
    "list_unsettled",
    f"WITH t AS MATERIALIZED ({_LISTED} WHERE t.settled_at IS NULL) SELECT * FROM t WHERE true",
)

# The turns for which a turn works, as an agent that another one asked: the nearest first.
ABOVE = Statement(
    "turns.above",
    """
    WITH RECURSIVE above (turn_id, agent, distance) AS (
        SELECT t.turn_id, t.agent, 1 FROM tool_effects AS e JOIN turns AS t USING (turn_id)
        WHERE e.effect_id = %(turn_id)s AND e.waits_for = 'agent'
        UNION ALL
        SELECT t.turn_id, t.agent, above.distance + 1
        FROM above JOIN tool_effects AS e ON e.effect_id = above.turn_id AND e.waits_for = 'agent'
        JOIN turns AS t ON t.turn_id = e.turn_id
    )
    SELECT turn_id, agent FROM above ORDER BY distance
    """,
    writes=False,
)

# Whether the message `m` of the session of the turn `t` is a message of the turn. Reads no later messages.
_WITHIN_TURN = """
            m.turn_id = t.turn_id AND m.seq >= t.first_seq
          AND m.seq < coalesce((SELECT n.first_seq FROM turns AS n
                                WHERE n.session_id = t.session_id AND n.seq > t.seq AND n.first_seq IS NOT NULL
                                ORDER BY n.seq LIMIT 1), 9223372036854775807)
""".strip()

# Whether the message `m` has usage of its own: a reply, a user's message that guards judged, or an answer to a question
# that guards judged. The usage at another tool's result is that of the agent that answered the call.
_IS_PAID = """
      (m.role = 'assistant' AND m.model IS NOT NULL
           OR m.role = 'user' AND m.usage IS NOT NULL
           OR m.role = 'tool' AND m.usage IS NOT NULL AND EXISTS (
                SELECT FROM tool_effects AS e
                JOIN messages AS a ON a.session_id = m.session_id AND a.seq = e.message_seq
                WHERE e.turn_id = m.turn_id AND e.waits_for = 'user'
                  AND a.tool_calls -> e.position ->> 'id' = m.tool_call_id))
""".strip()

# The paid messages of the turn `t`, each with the agent that wrote it, or whose guards judged it. The record of a
# prompt names its agent if it is another one than that of the turn's reply before. The turn's agent is the last one: it
# counts only if no record is stored, as in an import or a fork. The window functions keep one probe for each turn: a
# join could read all messages of the installation.
_PAID = f"""
    LATERAL (
        SELECT m.*, coalesce(max(m.names) OVER (PARTITION BY greatest(m.stint, 1)), t.agent) AS agent
        FROM (SELECT m.model, m.fallback, m.usage, m.created_at, m.prompt ->> 'agent' AS names,
                     count(m.prompt ->> 'agent') OVER (ORDER BY m.seq) AS stint
              FROM messages AS m WHERE m.session_id = t.session_id AND {_WITHIN_TURN} AND {_IS_PAID}) AS m) AS m
""".strip()

# What each reply of a turn used and, `with_others`, of the turns of other agents that answer its calls. A fallback's
# reply has the fallback's model.
USED = Statement(
    "turns.used",
    f"""
    WITH RECURSIVE counted (turn_id) AS (
        SELECT %(turn_id)s::uuid
        UNION
        SELECT e.effect_id FROM counted JOIN tool_effects AS e USING (turn_id)
        WHERE e.waits_for = 'agent' AND %(with_others)s
    )
    SELECT m.agent, m.model, m.fallback, m.usage, m.created_at
    FROM counted JOIN turns AS t USING (turn_id) CROSS JOIN {_PAID}
    """,
    writes=False,
)

# The id of the turn that comes `most` turns after the one with the id `first_id`; no row if there are fewer.
USAGE_PART = Statement(
    "turns.usage_part",
    """
    SELECT turn_id FROM turns WHERE turn_id >= %(first_id)s::uuid
    ORDER BY turn_id OFFSET (SELECT %(most)s::bigint) LIMIT 1
    """,
    writes=False,
)

# What all replies used of the turns from `first_id` to below `until_id` that were accepted since `since`: a row for
# each day, model and `key`. Turns that a fork copied have later ids than their time; they count in its source. Prices
# may depend on a prompt's size, so only replies to prompts of a similar size share a row. Each turn looks its session
# up: a join could read all sessions for each part.
USAGE = Statement(
    "turns.usage",
    f"""
    WITH used AS (
        SELECT CASE %(by)s WHEN 'agent' THEN m.agent WHEN 'model' THEN m.model
                           WHEN 'day' THEN (m.created_at AT TIME ZONE %(zone)s)::date::text
                           ELSE t.user_id END AS key,
               m.agent, m.model, m.fallback, (m.created_at AT TIME ZONE 'UTC')::date AS day, m.usage,
               (m.usage ->> 'input_tokens')::bigint AS input, (m.usage ->> 'output_tokens')::bigint AS output,
               (m.usage ->> 'cached_tokens')::bigint AS cached
        FROM turns AS t CROSS JOIN {_PAID}
        WHERE t.turn_id >= %(first_id)s::uuid AND t.turn_id < %(until_id)s::uuid AND t.accepted_at >= %(since)s
          AND (SELECT s.forked_from IS NULL OR t.accepted_at >= s.created_at
               FROM sessions AS s WHERE s.session_id = t.session_id)
    )
    SELECT key, agent, model, fallback, day, usage IS NOT NULL AS reported, count(*) AS replies,
           sum(input)::bigint AS input, sum(cached)::bigint AS cached, sum(output)::bigint AS output
    FROM used GROUP BY 1, 2, 3, 4, 5, 6, width_bucket(input, 0, 1000000, 40)
    """,
    writes=False,
)

OWNER = Statement("turns.owner", "SELECT user_id FROM turns WHERE turn_id = %(turn_id)s::uuid", writes=False)

PLACE = Statement(
    "turns.place",
    """
    SELECT t.user_id, t.agent, s.scope FROM turns AS t JOIN sessions AS s USING (session_id)
    WHERE t.turn_id = %(turn_id)s
    """,
    writes=False,
)

ATTEMPT_ERROR = Statement(
    "turns.attempt_error",
    "SELECT attempt_error FROM turns WHERE turn_id = %(turn_id)s",
    writes=False,
)

HELD_TURNS = Statement(
    "turns.unsaved_turns",
    """
    SELECT turn_id, unsaved_error FROM turns
    WHERE session_id = %(session_id)s AND settled_at IS NULL AND unsaved_error IS NOT NULL
    """,
    writes=False,
)

# Of the turns, those that are settled, or erased. Of `asking`, also those that wait for the client of a request
# (`stops`).
SETTLED_AMONG = Statement(
    "turns.settled_among",
    f"""
    SELECT turn_id, true AS settled FROM turns WHERE turn_id = ANY (%(turn_ids)s::uuid[]) AND settled_at IS NOT NULL
    UNION ALL
    SELECT t.turn_id, false FROM turns AS t
    WHERE t.turn_id = ANY (%(asking)s::uuid[]) AND t.status = 'parked' AND EXISTS ({STOPPED})
    UNION ALL
    SELECT u.turn_id, true FROM unrouted AS u LEFT JOIN turns AS t ON t.turn_id = u.routed_to
    WHERE u.turn_id = ANY (%(turn_ids)s::uuid[])
      AND (u.error_code IS NOT NULL OR t.settled_at IS NOT NULL
           OR u.turn_id = ANY (%(asking)s::uuid[]) AND t.status = 'parked' AND EXISTS ({STOPPED}))
    UNION ALL
    SELECT asked.turn_id, true FROM unnest(%(turn_ids)s::uuid[]) AS asked (turn_id)
    WHERE NOT EXISTS (SELECT FROM turns AS t WHERE t.turn_id = asked.turn_id)
      AND NOT EXISTS (SELECT FROM unrouted AS u WHERE u.turn_id = asked.turn_id)
    """,
    writes=False,
)

# Records feedback on a turn that has a reply; returns the question and the reply. The caller's transaction may also
# learn a case from the turn. The lock on the user's row serialises the transaction with the user's erasure.
FEEDBACK = Statement(
    "turns.feedback",
    """
    WITH held AS (
        SELECT u.user_id FROM users AS u
        WHERE u.user_id = (SELECT user_id FROM turns WHERE turn_id = %(turn_id)s) FOR KEY SHARE
    ), rated AS (
        UPDATE turns AS t SET feedback = %(feedback)s::jsonb FROM held
        WHERE t.turn_id = %(turn_id)s AND t.reply_seq IS NOT NULL
        RETURNING t.session_id, t.turn_id, held.user_id, t.agent, t.status, t.first_seq, t.reply_seq,
                  (t.additions -> 'remember' = 'false') IS NOT TRUE AS is_remembered
    )
    SELECT rated.user_id, rated.agent, rated.status, rated.is_remembered, reply.content AS reply,
           (SELECT string_agg(m.content, E'\\n' ORDER BY m.seq) FROM messages AS m
            WHERE m.session_id = rated.session_id AND m.seq BETWEEN rated.first_seq AND rated.reply_seq
              AND m.turn_id = rated.turn_id AND m.role = 'user') AS asked
    FROM rated JOIN messages AS reply ON reply.session_id = rated.session_id AND reply.seq = rated.reply_seq
    """,
)

_OF_TURN = f"t.turn_id = %(turn_id)s AND {_WITHIN_TURN}"

# The bytes of the texts of a turn's replies.
ANSWER_BYTES = Statement(
    "turns.answer_bytes",
    f"""
    SELECT coalesce(sum(octet_length(m.content)), 0)::bigint AS size
    FROM turns AS t JOIN messages AS m ON m.session_id = t.session_id
    WHERE {_OF_TURN} AND m.role = 'assistant'
    """,
    writes=False,
)

_PAGE_OF_TURN = sized(
    f"""
    SELECT seq, turn_id, role, content, tool_calls, tool_call_id, channel, token_count, model, fallback, stop_reason,
           message_id, parts, created_at, error_code, error_message, {QUESTIONS}
    FROM own AS m WHERE number > %(after)s ORDER BY seq LIMIT %(most)s
    """,
    order="seq",
    size="octet_length(content) + coalesce(octet_length(tool_calls::text), 0)",
)

# The messages of a turn, without the first `after` ones. The turn's messages begin at its `first_seq` and end before
# the `first_seq` of the next turn. Each row has the total number of the turn's messages. If no message is left, one row
# without a message has the total.
MESSAGES_OF_TURN = Statement(
    "turns.messages_of_turn",
    f"""
    WITH own AS (
        SELECT m.*, failed.error_code, failed.error_message, row_number() OVER (ORDER BY m.seq) AS number
        FROM turns AS t JOIN messages AS m ON m.session_id = t.session_id {WITH_FAILURE}
        WHERE {_OF_TURN}
    )
    SELECT (SELECT count(*) FROM own) AS total, page.*
    FROM (VALUES (1)) AS one LEFT JOIN ({_PAGE_OF_TURN}) AS page ON true
    ORDER BY page.seq
    """,
    writes=False,
)

STATES = Statement(
    "turns.states",
    f"""
    SELECT t.turn_id, t.status, t.attempts, s.tick, s.not_before,
           CASE WHEN t.status = 'parked' THEN (
                SELECT string_agg(CASE WHEN e.turn_id = t.turn_id THEN e.progress
                                       ELSE concat_ws(' ', e.effect_id, q.status, e.status, e.payload -> 'judged',
                                                      jsonb_array_length(e.payload -> 'said')) END,
                                  ' ' ORDER BY e.effect_id)
                FROM ({below("t.turn_id")}) AS below {each_row("turns", "turn_id = below.turn_id", "q")}
                {each_row("tool_effects", "turn_id = q.turn_id", "e")}
                WHERE CASE WHEN e.turn_id = t.turn_id THEN e.status = 'intended' AND e.progress IS NOT NULL
                           ELSE e.waits_for IN ('user', 'client') OR e.approver IS NOT NULL END)
                WHEN t.status = 'waiting_approval' THEN (
                SELECT count(e.decided_by)::text FROM tool_effects AS e WHERE e.turn_id = t.turn_id) END AS progress
    FROM turns AS t JOIN sessions AS s USING (session_id)
    WHERE t.turn_id = ANY (%(turn_ids)s::uuid[])
    UNION ALL
    SELECT u.turn_id, coalesce(u.error_code, t.status, 'accepted'), t.attempts, s.tick, s.not_before, NULL
    FROM unrouted AS u LEFT JOIN turns AS t ON t.turn_id = u.routed_to LEFT JOIN sessions AS s USING (session_id)
    WHERE u.turn_id = ANY (%(turn_ids)s::uuid[])
    """,
    writes=False,
)

# --- repeated requests -------------------------------------------------------------------

# The turn of the user's last request that has this fingerprint and whose answer was sent. `recent`: the turn was
# settled in the last `within_s` seconds.
ANSWERED = Statement(
    "turns.answered",
    f"""
    SELECT a.turn_id, t.session_id, t.seq, t.status,
           t.settled_at > perdure_now() - make_interval(secs => %(within_s)s) AS recent,
           t.status = 'parked' AND EXISTS (
               SELECT FROM tool_effects AS e
               WHERE e.turn_id = t.turn_id AND e.waits_for = 'user' AND e.status = 'intended' AND NOT {NEW_ANSWER})
               AS asks,
           (SELECT max(position) FROM inbox WHERE turn_id = t.turn_id) AS messages,
           EXISTS (SELECT FROM inbox AS i
                   WHERE i.turn_id = t.turn_id AND i.position > 1
                     AND i.message_id LIKE %(fingerprint)s || '-%%') AS joined
    FROM answered_requests AS a JOIN turns AS t USING (turn_id)
    WHERE a.user_id = %(user_id)s AND a.fingerprint = %(fingerprint)s
    """,
    writes=False,
)

NOTE_ANSWERED = Statement(
    "turns.note_answered",
    """
    INSERT INTO answered_requests (user_id, fingerprint, turn_id, answered_at)
    SELECT user_id, %(fingerprint)s, turn_id, perdure_now() FROM turns
    WHERE turn_id = %(turn_id)s AND user_id = %(user_id)s
    ON CONFLICT (user_id, fingerprint) DO UPDATE SET turn_id = excluded.turn_id, answered_at = excluded.answered_at
    """,
)

# Whether a repeated request does not find this turn: it was settled too long ago, or is cancelled or about to be. A
# client that stops an answer and sends its message again wants another one.
NOT_REPEATED = Statement(
    "turns.not_repeated",
    """
    SELECT turn_id FROM turns
    WHERE turn_id = %(turn_id)s
      AND (settled_at <= perdure_now() - make_interval(secs => %(within_s)s)
           OR status = 'cancelled' OR settled_at IS NULL AND cancel_requested_at IS NOT NULL)
    """,
    writes=False,
)
