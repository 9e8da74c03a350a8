"""Every statement of a turn's life, named, in the order in which it lives.

Each write is one statement and so one commit. What a runner writes hangs on the row that
its CTE `fenced` returns: no row when the fencing token has moved on, and then nothing at
all is written. Locks are always taken session first, then turn.

Over 500 lines on purpose: what may be done to a turn's rows, and in which order, is read in one
place.
"""

from __future__ import annotations

from perdure.casebank.queries import WITH_USES
from perdure.database.engine import Statement
from perdure.fencing import HELD, RAISED
from perdure.sessions.states import State, Trigger, sql
from perdure.snapshots.queries import NEXT_VARIABLES_TICK, PRESENT_VARIABLES, WITH_STEP, pending
from perdure.tenants import OF_TENANT
from perdure.turns.intake import CLOSED

# --- a user's share ----------------------------------------------------------------------

# A session is *admitted* while it may run its turns or does: it counts against `user_concurrency`, the turns of its
# user that run at once. With as many admitted, a further session of the user is *queued*: no wake-up is published for
# it, and no worker claims it, until a settled turn of the user admits it (ADMIT) or the sweeper does (ADMIT_DUE).
#
# What waits for a person or a model (`not_before`), or after an error (`strikes`), takes no place. A session without
# such a wait is in `sessions_admitted_idx`, which admission keeps short.
_ADMITTED = """
        unsettled > 0 AND not_before IS NULL AND (lease_until IS NOT NULL OR strikes = 0)
""".strip()

# `not_before` keeps a queued session out of what the sweeper reads (WAKE_DUE). Nothing but a lost update of this
# release, or a fleet of the release before, lets it come.
_QUEUE = """queued_at = coalesce(s.queued_at, perdure_now()), not_before = perdure_now() + interval '1 hour',
            woken_at = perdure_now(), wakes = 0, paced = false"""

# The next session of a user: the most urgent one, then the one that waits longest.
_NEXT = """
    SELECT session_id FROM sessions
    WHERE user_id = {user_id} AND unsettled > 0 AND queued_at IS NOT NULL
    ORDER BY priority DESC, queued_at
""".strip()

_ADMIT = """
    UPDATE sessions AS s
    SET queued_at = NULL, not_before = NULL, woken_at = perdure_now(), wakes = 0
    WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM locked))
    RETURNING s.session_id, s.priority
""".strip()

# Admits one session of a user who has room, once a turn of the user has freed a place. Two places that are freed at
# once admit two: the second skips the row that the first has locked.
ADMIT = Statement(
    "turns.admit",
    f"""
    WITH taken AS (
        SELECT count(*) AS places FROM (
            SELECT FROM sessions WHERE user_id = %(user_id)s AND {_ADMITTED}
            LIMIT (SELECT %(user_concurrency)s::bigint)) AS admitted
    ), locked AS (
        {_NEXT.format(user_id="%(user_id)s")}
        LIMIT CASE WHEN (SELECT places FROM taken) < %(user_concurrency)s THEN 1 ELSE 0 END
        FOR NO KEY UPDATE SKIP LOCKED
    )
    {_ADMIT}
    """,
)

# The sweeper's part: fills the places of every user with queued sessions, whatever became of the turns that should
# have done so. Visits one row of `sessions_queued_idx` per user, however many sessions each has queued.
ADMIT_DUE = Statement(
    "sweep.admit_due",
    f"""
    WITH RECURSIVE waiting (user_id) AS (
        (SELECT user_id FROM sessions WHERE unsettled > 0 AND queued_at IS NOT NULL ORDER BY user_id LIMIT 1)
        UNION ALL
        SELECT (SELECT user_id FROM sessions
                WHERE unsettled > 0 AND queued_at IS NOT NULL AND user_id > waiting.user_id ORDER BY user_id LIMIT 1)
        FROM waiting WHERE waiting.user_id IS NOT NULL
    ), free AS (
        SELECT few.user_id, %(user_concurrency)s - (
            SELECT count(*) FROM (
                SELECT FROM sessions WHERE user_id = few.user_id AND {_ADMITTED}
                LIMIT (SELECT %(user_concurrency)s::bigint)) AS admitted) AS places
        FROM (SELECT user_id FROM waiting WHERE user_id IS NOT NULL LIMIT %(most_users)s) AS few
    ), due AS (
        SELECT chosen.session_id FROM free, LATERAL ({_NEXT.format(user_id="free.user_id")}
                                                     LIMIT greatest(free.places, 0)) AS chosen
        LIMIT %(most)s
    ), locked AS (
        SELECT session_id FROM sessions WHERE session_id = ANY (ARRAY(SELECT session_id FROM due))
        FOR NO KEY UPDATE SKIP LOCKED
    )
    {_ADMIT}
    """,
)

# --- accept ------------------------------------------------------------------------------

# A wake-up for the session is on its way, and the sweeper repeats it in time: another one would only make the queue
# longer. A session that was woken in vain several times is woken by its messages, too, sooner than by the sweeper.
_WOKEN = """
    (s.woken_at <= perdure_now()
     AND s.woken_at > perdure_now() - make_interval(secs => %(sweep_s)s * 2 ^ least(s.wakes, 2)))
""".strip()

# The whole of accepting into a session that exists. A session whose agent this installation no
# longer has goes on with the default one. Returns no row where more must be known first: there
# is no such session, it is over or nobody has used it for long, it is busy and the message would
# not queue, or the message was accepted before.
ENQUEUE = Statement(
    "turns.enqueue",
    f"""
    WITH share AS (
        SELECT count(*) >= %(user_concurrency)s AS taken FROM (
            SELECT FROM sessions WHERE user_id = %(user_id)s AND {_ADMITTED}
            LIMIT (SELECT %(user_concurrency)s::bigint)) AS admitted
    ), target AS (
        UPDATE sessions AS s
        SET state = CASE s.state WHEN '{State.INITIALIZING}' THEN {sql(Trigger.SESSION_CREATED, column="s.state")}
                                 ELSE s.state END,
            last_turn_seq = s.last_turn_seq + 1,
            unsettled = s.unsettled + 1,
            last_activity_at = perdure_now(),
            -- The caller publishes a wake-up now. Later messages of a busy session keep the sweeper's back-off.
            woken_at = CASE WHEN s.unsettled = 0 THEN perdure_now() ELSE s.woken_at END,
            wakes = CASE WHEN s.unsettled = 0 THEN 0 ELSE s.wakes END,
            -- The user's other sessions take all places: this one waits, without a wake-up (see ADMIT).
            queued_at = CASE WHEN s.unsettled > 0 THEN s.queued_at
                             WHEN (SELECT taken FROM share) THEN perdure_now() END,
            not_before = CASE WHEN s.unsettled > 0 THEN s.not_before
                              WHEN (SELECT taken FROM share) THEN perdure_now() + interval '1 hour' END,
            paced = s.paced AND s.unsettled > 0,
            priority = CASE WHEN s.unsettled = 0 THEN %(priority)s::smallint
                            ELSE greatest(s.priority, %(priority)s::smallint) END,
            channels = CASE WHEN %(channel)s = ANY (s.channels) THEN s.channels ELSE s.channels || %(channel)s::text END
        WHERE s.session_id = coalesce(
                %(session_id)s::uuid,
                (SELECT session_id FROM sessions WHERE user_id = %(user_id)s AND scope = %(scope)s AND routable))
          AND s.user_id = %(user_id)s
          AND s.end_requested_at IS NULL
          AND (%(session_id)s::uuid IS NOT NULL
               OR s.routable
                  AND (s.unsettled > 0
                       OR s.last_activity_at > perdure_now() - make_interval(secs => %(idle_s)s)))
          AND (%(on_busy)s = 'enqueue' OR s.unsettled = 0)
          AND NOT EXISTS (
                SELECT FROM inbox
                WHERE user_id = %(user_id)s AND channel = %(channel)s AND message_id = %(message_id)s)
        -- A struck session (see STRIKE) is woken by the sweeper alone: a message must not shorten its back-off.
        RETURNING s.session_id, s.last_turn_seq,
                  s.lease_until > perdure_now() OR s.unsettled > 1 AND {_WOKEN} OR s.not_before > perdure_now()
                  OR s.lease_until IS NULL AND s.strikes > 0 AND s.woken_at IS NOT NULL AS held,
                  CASE WHEN s.agent = ANY (%(agents)s::text[]) THEN s.agent ELSE %(default_agent)s END AS agent
    ), turn AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, reply_to, metadata,
                           status, accepted_at)
        SELECT %(turn_id)s::uuid, session_id, last_turn_seq, %(user_id)s, coalesce(%(agent)s, agent), %(channel)s,
               %(priority)s::smallint, %(reply_to)s::jsonb, %(metadata)s::jsonb, 'accepted', perdure_now()
        FROM target
    ), input AS (
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, accepted_at)
        SELECT %(user_id)s, %(channel)s, %(message_id)s, %(turn_id)s::uuid, 1, %(text)s, perdure_now()
        FROM target
    )
    SELECT session_id, last_turn_seq AS seq, coalesce(held, false) AS held FROM target
    """,
)

FIND_ACCEPTED = Statement(
    "turns.find_accepted",
    f"""
    SELECT i.turn_id, i.text, t.session_id, t.seq, t.status, {_WOKEN} OR s.not_before > perdure_now() AS held
    FROM inbox AS i JOIN turns AS t USING (turn_id) JOIN sessions AS s USING (session_id)
    WHERE i.user_id = %(user_id)s AND i.channel = %(channel)s AND i.message_id = %(message_id)s
    """,
    writes=False,
)

# Adds a message to the newest turn of a locked session, if that turn has not begun, is for the same agent, channel and
# receiver, and its messages together have at most `max_chars` characters then.
MERGE = Statement(
    "turns.merge",
    f"""
    WITH newest AS (
        SELECT turn_id, seq, status FROM turns
        WHERE session_id = %(session_id)s AND settled_at IS NULL
        ORDER BY seq DESC LIMIT 1
    ), target AS (
        UPDATE turns AS t SET priority = greatest(t.priority, %(priority)s::smallint)
        FROM newest
        WHERE t.turn_id = newest.turn_id AND t.status = 'accepted' AND t.channel = %(channel)s
          AND t.agent = coalesce(%(agent)s::text, (
                SELECT CASE WHEN agent = ANY (%(agents)s::text[]) THEN agent ELSE %(default_agent)s END
                FROM sessions WHERE session_id = %(session_id)s))
          AND t.reply_to IS NOT DISTINCT FROM %(reply_to)s::jsonb
          AND (SELECT sum(length(text)) FROM inbox WHERE turn_id = newest.turn_id) + length(%(text)s::text)
              <= %(max_chars)s
        RETURNING t.turn_id, t.seq, t.status
    ), ranked AS (
        UPDATE sessions SET priority = greatest(priority, %(priority)s::smallint)
        WHERE session_id = %(session_id)s AND priority < %(priority)s::smallint AND EXISTS (SELECT FROM target)
    ), input AS (
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, accepted_at)
        SELECT %(user_id)s, %(channel)s, %(message_id)s, turn_id,
               (SELECT max(position) + 1 FROM inbox WHERE turn_id = target.turn_id), %(text)s, perdure_now()
        FROM target
    )
    SELECT turn_id, seq, status,
           (SELECT {_WOKEN} OR s.not_before > perdure_now() FROM sessions AS s
            WHERE s.session_id = %(session_id)s) AS held
    FROM target
    """,
)

# Whoever comes next with a message of this user waits until the transaction is over.
QUEUE_UP = Statement(
    "turns.queue_up",
    "SELECT pg_advisory_xact_lock(hashtextextended('perdure rate of ' || %(user_id)s::text, 0)) IS NULL AS free",
)

# For how many seconds still as many messages as a rate allows lie within its time: then the oldest of
# those leaves it. One that was accepted while the clock was ahead is not counted; by less, a transaction only began
# later and was first.
FULL_FOR = Statement(
    "turns.full_for",
    """
    SELECT max(extract(epoch FROM oldest.accepted_at - perdure_now()) + rate.within_s)::float AS full_s
    FROM (VALUES (%(minute_s)s::int, %(per_minute)s::int),
                 (%(hour_s)s::int, %(per_hour)s::int)) AS rate (within_s, most),
         LATERAL (SELECT accepted_at FROM inbox
                  WHERE user_id = %(user_id)s
                    AND accepted_at BETWEEN perdure_now() - make_interval(secs => rate.within_s)
                                        AND perdure_now() + interval '10 seconds'
                  ORDER BY accepted_at DESC OFFSET greatest(rate.most - 1, 0) LIMIT 1) AS oldest
    WHERE rate.most > 0
    """,
    writes=False,
)

# --- claim -------------------------------------------------------------------------------

# A session whose turn waits for a person or for a model is nobody's before its time, whoever wakes
# it. A moment that lies ahead of the last wake-up was given while the server's clock was wrong, and is none.
_IN_TIME = """
          (not_before IS NULL OR not_before <= perdure_now() OR woken_at > perdure_now() + interval '1 second')
""".strip()

# What the model is told of what came before a turn: the channel of the turn before it, be it the
# last one of the session before; and that session, with its summary once there is one. And what
# the session keeps between its turns.
_BEFORE = f"""
           {{held}}.previous_session_id, previous.summary AS previous_summary,
           coalesce(
               (SELECT channel FROM turns WHERE session_id = %(session_id)s AND seq = begun.seq - 1),
               (SELECT channel FROM turns WHERE session_id = {{held}}.previous_session_id ORDER BY seq DESC LIMIT 1)
           ) AS previous_channel,
           {{held}}.tick, {{held}}.saved_token, {{held}}.saved_tick, {{held}}.variables_tick,
           {PRESENT_VARIABLES} AS variables
""".strip()

# Takes the lease and begins (or takes over) the session's oldest unsettled turn. Skips a
# row that somebody has locked. A lease that lies too far ahead was given while the server's
# clock was wrong, and is none. From `isolate_from` claims of one turn on, only a process of the
# turn's own may claim it. While the fleet's intake is closed, nobody may.
#
# Where as many of the user's sessions have a live lease as may run at once, the session is queued instead, at the cost
# of no attempt. No lock is held for the count: claims of one user that run at the same moment do not see each other,
# so the limit is exceeded by at most their number, until one of these turns settles. A turn that will only be settled
# (cancelled, or out of attempts) needs no place.
CLAIM = Statement(
    "turns.claim",
    f"""
    WITH candidate AS (
        SELECT session_id, user_id, strikes, claims, wakes, not_before, queued_at FROM sessions
        WHERE session_id = %(session_id)s AND unsettled > 0
          AND (lease_until IS NULL OR lease_until <= perdure_now()
               OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s * 2))
          AND {_IN_TIME}
          AND NOT {CLOSED}
        FOR NO KEY UPDATE SKIP LOCKED
    ), share AS (
        SELECT count(*) < %(user_concurrency)s
               OR (SELECT strikes >= %(max_attempts)s FROM candidate)
               OR coalesce((SELECT cancel_requested_at IS NOT NULL FROM turns
                            WHERE session_id = %(session_id)s AND settled_at IS NULL
                            ORDER BY seq LIMIT 1), false) AS free
        FROM (
            SELECT FROM sessions
            WHERE user_id = (SELECT user_id FROM candidate) AND unsettled > 0 AND not_before IS NULL
              AND lease_until > perdure_now() AND lease_until <= perdure_now() + make_interval(secs => %(lease_s)s * 2)
            LIMIT (SELECT %(user_concurrency)s::bigint)) AS running
    ), queued AS (
        UPDATE sessions AS s
        SET {_QUEUE}
        FROM candidate, share
        WHERE s.session_id = candidate.session_id AND NOT share.free
    ), claimed AS (
        UPDATE sessions AS s
        SET {RAISED},
            lease_owner = %(owner)s,
            lease_until = perdure_now() + make_interval(secs => %(lease_s)s),
            strikes = s.strikes + 1,
            claims = s.claims + 1,
            wakes = 0,
            not_before = NULL,
            queued_at = NULL,
            state = {sql(Trigger.TURN_CLAIMED, column="s.state")}
        FROM candidate, share
        WHERE s.session_id = candidate.session_id AND candidate.claims < %(isolate_from)s AND share.free
        RETURNING s.session_id, s.token, s.nonce, s.strikes, s.spent_s, s.message_count, s.previous_session_id, s.tick,
                  s.saved_token, s.saved_tick, s.variables_tick,
                  candidate.not_before IS NOT NULL AND candidate.queued_at IS NULL AS waited
    ), begun AS (
        UPDATE turns AS t
        SET status = 'running',
            -- None for a turn that waited for a person or, with an error (see PARK_FOR), for a model.
            attempts = t.attempts + (t.held IS NULL AND t.status <> 'waiting_approval' AND NOT claimed.waited
                                     AND NOT (t.status = 'parked' AND t.error_code IS NOT NULL))::int,
            started_at = coalesce(t.started_at, perdure_now()),
            first_seq = coalesce(t.first_seq, claimed.message_count + 1)
        FROM claimed
        WHERE t.turn_id = (
                SELECT turn_id FROM turns
                WHERE session_id = %(session_id)s AND settled_at IS NULL ORDER BY seq LIMIT 1)
          AND t.settled_at IS NULL
        RETURNING t.turn_id, t.seq, t.user_id, t.agent, t.channel, t.first_seq, t.cancel_requested_at,
                  t.started_at, t.metadata ->> 'language' AS language, t.held::text AS held
    )
    SELECT candidate.strikes AS strikes_before, candidate.claims AS claims_before, candidate.wakes AS wakes_before,
           share.free, claimed.token, claimed.nonce, claimed.strikes, claimed.spent_s, begun.*,
           {_BEFORE.format(held="claimed")}
    FROM candidate CROSS JOIN share LEFT JOIN claimed USING (session_id) LEFT JOIN begun ON true
         LEFT JOIN sessions AS previous ON previous.session_id = claimed.previous_session_id
    """,
)

# Whether a claim that came back empty-handed met a lock for a moment, or had nothing to do.
CLAIMABLE = Statement(
    "turns.claimable",
    f"""
    SELECT unsettled > 0 AND NOT {CLOSED} AND {_IN_TIME}
           AND (lease_until IS NULL OR lease_until <= perdure_now()
                OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s * 2)) AS claimable
    FROM sessions WHERE session_id = %(session_id)s
    """,
    writes=False,
)

# Begins the next turn of a session whose lease is already held, or goes on with the present
# one after its runner lost sight of what was committed. While the fleet's intake is closed, no turn begins;
# one that runs goes on.
BEGIN_NEXT = Statement(
    "turns.begin_next",
    f"""
    WITH fenced AS (
        UPDATE sessions SET state = CASE WHEN unsettled > 0 THEN {sql(Trigger.TURN_CLAIMED)} ELSE state END,
               strikes = greatest(strikes, 1), claims = greatest(claims, 1), not_before = NULL, queued_at = NULL,
               lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
        WHERE {HELD}
        RETURNING session_id, token, strikes, spent_s, message_count, previous_session_id, tick,
                  saved_token, saved_tick, variables_tick
    ), begun AS (
        UPDATE turns AS t
        SET status = 'running',
            attempts = t.attempts + (t.status NOT IN ('running', 'waiting_approval') AND t.held IS NULL)::int,
            started_at = coalesce(t.started_at, perdure_now()),
            first_seq = coalesce(t.first_seq, fenced.message_count + 1)
        FROM fenced
        WHERE t.turn_id = (
                SELECT turn_id FROM turns
                WHERE session_id = %(session_id)s AND settled_at IS NULL ORDER BY seq LIMIT 1)
          AND t.settled_at IS NULL
          AND (t.status = 'running' OR NOT {CLOSED})
        RETURNING t.turn_id, t.seq, t.user_id, t.agent, t.channel, t.first_seq, t.cancel_requested_at,
                  t.started_at, t.metadata ->> 'language' AS language, t.held::text AS held
    )
    SELECT fenced.strikes, fenced.spent_s, 0 AS wakes_before, begun.*,
           {_BEFORE.format(held="fenced")}
    FROM fenced LEFT JOIN begun ON true
         LEFT JOIN sessions AS previous ON previous.session_id = fenced.previous_session_id
    """,
)

# The conversation as the present turn finds it: the last turns' messages, then what the
# sender wrote. Bounded by the window, whatever the session's length.
HISTORY = Statement(
    "turns.history",
    """
    SELECT m.seq, m.turn_id, m.role, m.content, m.tool_calls, m.tool_call_id, m.token_count, m.usage,
           NULL::text AS message_id, m.created_at, NULL::int AS position
    FROM messages AS m
    WHERE m.session_id = %(session_id)s AND m.seq >= (
        SELECT min(first_seq) FROM (
            SELECT first_seq FROM turns
            WHERE session_id = %(session_id)s AND seq <= %(turn_seq)s AND first_seq IS NOT NULL
            ORDER BY seq DESC LIMIT %(window)s) AS recent)
    UNION ALL
    SELECT NULL, i.turn_id, 'user', i.text, NULL, NULL, NULL, NULL, i.message_id, i.accepted_at, i.position
    FROM inbox AS i
    WHERE i.turn_id = %(turn_id)s
      AND NOT EXISTS (SELECT FROM messages WHERE session_id = %(session_id)s AND seq = %(first_seq)s)
    ORDER BY seq NULLS LAST, position
    """,
    writes=False,
)

# Renews the leases of a process in one statement; rows that somebody has locked keep what
# they have until the next beat. What was released at this moment stays so: a lease that
# nobody holds would keep everybody out until it ran out.
RENEW = Statement(
    "turns.renew",
    """
    WITH held AS (
        SELECT s.session_id FROM sessions AS s
        JOIN unnest(%(session_ids)s::uuid[], %(tokens)s::bigint[], %(nonces)s::uuid[])
                 AS mine (session_id, token, nonce) USING (session_id, token, nonce)
        WHERE s.lease_until IS NOT NULL
        FOR NO KEY UPDATE OF s SKIP LOCKED
    )
    UPDATE sessions AS s SET lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
    FROM held WHERE s.session_id = held.session_id
    RETURNING s.session_id
    """,
)

# What a process must know of the turns that it runs: still its own, still wanted.
WATCH = Statement(
    "turns.watch",
    """
    SELECT s.session_id, t.turn_id, s.token, s.nonce, t.cancel_requested_at IS NOT NULL AS cancelled
    FROM unnest(%(session_ids)s::uuid[], %(turn_ids)s::uuid[]) AS mine (session_id, turn_id)
    JOIN sessions AS s USING (session_id)
    JOIN turns AS t USING (turn_id)
    """,
    writes=False,
)

# What a worker must know of sessions whose turn runs in a process of its own, which may be unable to see it.
WATCH_ISOLATED = Statement(
    "turns.watch_isolated",
    """
    SELECT s.session_id, s.token, s.nonce, s.lease_owner, s.tick, s.spent_s,
           extract(epoch FROM s.lease_until - perdure_now())::float AS left_s,
           oldest.turn_id, oldest.agent, oldest.cancel_requested_at IS NOT NULL AS cancelled
    FROM sessions AS s
    LEFT JOIN LATERAL (
        SELECT turn_id, agent, cancel_requested_at FROM turns
        WHERE session_id = s.session_id AND settled_at IS NULL ORDER BY seq LIMIT 1) AS oldest ON true
    WHERE s.session_id = ANY (%(session_ids)s::uuid[])
    """,
    writes=False,
)

# --- step --------------------------------------------------------------------------------

# One step: messages join the transcript, tool calls get their intent or their result, working
# variables that changed are kept. By its tick it is committed once, however often it is sent. The claim
# that goes on from here is the first attempt at what follows: a tool that kills its process at
# once has used it up, though its intent was committed under the same claim.
STEP = Statement(
    "turns.step",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET message_count = message_count + %(added)s,
            tick = tick + 1,
            state = CASE WHEN %(asks)s THEN {sql(Trigger.TOOL_REQUESTED)} ELSE {sql(Trigger.TOOL_RESULT)} END,
            strikes = 1,
            spent_s = %(spent_s)s,
            variables_tick = {NEXT_VARIABLES_TICK},
            lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
        WHERE {HELD} AND tick = %(tick)s
        RETURNING session_id, token, tick, message_count - %(added)s AS base
    ), said AS (
        INSERT INTO messages (session_id, seq, turn_id, role, content, tool_calls, tool_call_id, message_id, channel,
                              token_count, model, fallback, usage, created_at)
        SELECT fenced.session_id, fenced.base + m.position, %(turn_id)s::uuid, m.role, m.content, m.tool_calls,
               m.tool_call_id, m.message_id, %(channel)s, m.token_count, m.model, m.fallback, m.usage,
               coalesce(m.created_at, perdure_now())
        FROM fenced, jsonb_to_recordset(%(messages)s::jsonb) AS m (
            position int, role text, content text, tool_calls jsonb, tool_call_id text, message_id text,
            token_count int, model text, fallback boolean, usage jsonb, created_at timestamptz)
    ), intended AS (
        INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,
                                  intended_at, decide_at)
        SELECT e.effect_id, %(turn_id)s::uuid, fenced.base + %(added)s, e.position, e.tool, e.arguments, e.effect,
               e.status, perdure_now(), perdure_now() + make_interval(secs => e.timeout_s)
        FROM fenced, jsonb_to_recordset(%(intents)s::jsonb) AS e (
            effect_id uuid, position int, tool text, arguments text, effect text, status text,
            timeout_s double precision)
    ), finished AS (
        UPDATE tool_effects AS t
        SET status = r.status, result = r.result, variables = NULL,
            finished_at = CASE WHEN r.status <> 'unknown' THEN perdure_now() END
        FROM fenced, jsonb_to_recordset(%(results)s::jsonb) AS r (effect_id uuid, status text, result text)
        WHERE t.effect_id = r.effect_id AND t.turn_id = %(turn_id)s
    ), {WITH_STEP.strip()}
    SELECT fenced.base, (SELECT cancel_requested_at FROM turns WHERE turn_id = %(turn_id)s) AS cancel_requested_at
    FROM fenced
    """,
)

# A result of one of several calls made side by side, as it comes. Not fenced: a late result
# may be written here, but it enters the transcript only by STEP.
FINISH_EFFECT = Statement(
    "turns.finish_effect",
    """
    UPDATE tool_effects
    SET status = CASE WHEN status = 'intended' THEN %(status)s ELSE status END,
        result = %(result)s, variables = %(variables)s::json, finished_at = perdure_now()
    WHERE effect_id = %(effect_id)s AND finished_at IS NULL
    """,
)

# A tool call that runs (again) has its full time from here on, and the lease with it.
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

# None is undecided for longer than its time, however far the clock was set back since.
EFFECTS_OF_STEP = Statement(
    "turns.effects_of_step",
    """
    SELECT effect_id, position, arguments, effect, status, result, variables,
           extract(epoch FROM least(decide_at - perdure_now(), decide_at - intended_at))::float AS undecided_s
    FROM tool_effects
    WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s
    ORDER BY position
    """,
    writes=False,
)

# --- settle ------------------------------------------------------------------------------

# Ends a turn: last messages, outcome, what is owed to its receiver; and either releases the
# session or, where more turns wait and the runner goes on, keeps its lease. `unsettled` is
# read from the locked row, so a turn accepted at this moment is not missed. `saved` says that a
# snapshot of the tick that this makes is in its store. The cases that the turn used get a row each; no case is locked.
# A `tick` that is given is the session's, so that what is sent twice settles once.
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
            spent_s = 0,
            variables_tick = {NEXT_VARIABLES_TICK},
            saved_token = CASE WHEN %(saved)s THEN token ELSE saved_token END,
            saved_tick = CASE WHEN %(saved)s THEN tick + 1 ELSE saved_tick END,
            last_activity_at = perdure_now(),
            lease_until = CASE WHEN %(keep)s AND unsettled > 1
                               THEN perdure_now() + make_interval(secs => %(lease_s)s) END,
            lease_owner = CASE WHEN %(keep)s AND unsettled > 1 THEN lease_owner END
        WHERE {HELD} AND tick = coalesce(%(tick)s::bigint, tick)
        RETURNING session_id, user_id, token, tick, message_count - %(added)s AS base, unsettled, end_requested_at,
                  lease_until
    ), said AS (
        INSERT INTO messages (session_id, seq, turn_id, role, content, tool_calls, tool_call_id, message_id, channel,
                              token_count, model, fallback, usage, created_at)
        SELECT fenced.session_id, fenced.base + m.position, %(turn_id)s::uuid, m.role, m.content, m.tool_calls,
               m.tool_call_id, m.message_id, %(channel)s, m.token_count, m.model, m.fallback, m.usage,
               coalesce(m.created_at, perdure_now())
        FROM fenced, jsonb_to_recordset(%(messages)s::jsonb) AS m (
            position int, role text, content text, tool_calls jsonb, tool_call_id text, message_id text,
            token_count int, model text, fallback boolean, usage jsonb, created_at timestamptz)
    ), settled AS (
        UPDATE turns AS t
        SET status = %(status)s, steps = %(steps)s, usage = %(usage)s::jsonb, settled_at = perdure_now(),
            settled_tick = fenced.tick, held = NULL, held_error = NULL,
            error_code = %(error_code)s, error_message = %(error_message)s,
            reply_seq = CASE WHEN %(replied)s THEN fenced.base + %(added)s END
        FROM fenced WHERE t.turn_id = %(turn_id)s
        RETURNING t.turn_id, t.reply_to
    ), doubtful AS (
        UPDATE tool_effects AS e
        SET status = CASE e.status WHEN 'intended' THEN 'unknown' WHEN 'asked' THEN 'denied' ELSE 'failed' END
        FROM fenced WHERE e.turn_id = %(turn_id)s AND e.status IN ('intended', 'asked', 'approved')
    ), {WITH_STEP.strip()}, {WITH_USES.strip()}, owed AS (
        INSERT INTO deliveries (delivery_id, turn_id, target, status, due_at, created_at)
        SELECT %(delivery_id)s::uuid, turn_id, reply_to, 'pending', perdure_now(), perdure_now()
        FROM settled WHERE reply_to IS NOT NULL
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

# What settling a turn must add to its transcript: the sender's messages that are not in it yet, and the calls
# that are open. Reads no stored JSON but the calls' ids, so that no row that this release cannot parse keeps a
# turn from being given up.
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
           said.steps, said.input_tokens, said.output_tokens
    FROM (SELECT count(*) AS steps,
                 coalesce(sum(CASE jsonb_typeof(usage -> 'input_tokens') WHEN 'number'
                              THEN (usage ->> 'input_tokens')::numeric END), 0)::bigint AS input_tokens,
                 coalesce(sum(CASE jsonb_typeof(usage -> 'output_tokens') WHEN 'number'
                              THEN (usage ->> 'output_tokens')::numeric END), 0)::bigint AS output_tokens
          FROM messages
          WHERE session_id = %(session_id)s AND seq >= %(first_seq)s AND turn_id = %(turn_id)s AND role = 'assistant'
         ) AS said
    """,
    writes=False,
)

# Commits how a turn ends, and shows nobody: the snapshot is saved first, and SETTLE comes then.
# Returns the messages that wait behind it, the pending events of that snapshot. Holding again is no
# progress: the strikes stay.
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

# Whether a session is still held under a token.
OWNED = Statement(
    "turns.owned",
    f"SELECT token FROM sessions WHERE {HELD}",
    writes=False,
)

# The store would not take the snapshot: the session is given back, for the sweeper to wake again,
# later than the last time (see WAKE_DUE).
PUT_OFF = Statement(
    "turns.put_off",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = NULL, lease_owner = NULL, woken_at = perdure_now(), wakes = %(wakes)s,
            strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
            state = {sql(Trigger.TURN_STOPPED)}
        WHERE {HELD}
        RETURNING session_id
    )
    UPDATE turns AS t SET status = 'parked', held_error = %(error)s
    FROM fenced WHERE t.turn_id = %(turn_id)s AND t.settled_at IS NULL
    RETURNING t.turn_id
    """,
)

# Gives a session back in the middle of a turn; what it had is a place to go on from.
PARK = Statement(
    "turns.park",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = NULL, lease_owner = NULL, spent_s = %(spent_s)s, woken_at = NULL,
            strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
            state = {sql(Trigger.TURN_STOPPED)}
        WHERE {HELD}
        RETURNING session_id
    )
    UPDATE turns AS t SET status = 'parked' FROM fenced WHERE t.turn_id = %(turn_id)s AND t.settled_at IS NULL
    RETURNING t.turn_id
    """,
)

# Gives a session back after an error: the claim stays counted as a strike. The sweeper wakes the session
# later after each strike (see WAKE_DUE), and in its next round once the strikes are used up: then the turn is
# given up.
STRIKE = Statement(
    "turns.strike",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = NULL, lease_owner = NULL, spent_s = %(spent_s)s,
            wakes = least(greatest(strikes - 1, 0), 6), claims = greatest(claims - 1, 0),
            woken_at = CASE WHEN strikes < %(max_attempts)s OR strikes > %(max_attempts)s + 1 THEN perdure_now() END,
            state = {sql(Trigger.TURN_STOPPED)}
        WHERE {HELD}
        RETURNING session_id, strikes, wakes, woken_at
    ), parked AS (
        UPDATE turns AS t SET status = 'parked' FROM fenced WHERE t.turn_id = %(turn_id)s AND t.settled_at IS NULL
        RETURNING t.turn_id
    )
    SELECT fenced.strikes, fenced.wakes, fenced.woken_at IS NULL AS due FROM fenced, parked
    """,
)

# The same until a model may answer. The turn says why, and after how many steps: its answer is delayed until it
# has taken another one, however often it is tried meanwhile.
PARK_FOR = Statement(
    "turns.park_for",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = NULL, lease_owner = NULL, spent_s = %(spent_s)s, woken_at = perdure_now(), wakes = 0,
            not_before = perdure_now() + make_interval(secs => %(wait_s)s), paced = true,
            strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
            state = {sql(Trigger.TURN_STOPPED)}
        WHERE {HELD}
        RETURNING session_id
    )
    UPDATE turns AS t SET status = 'parked', error_code = %(error_code)s, steps = %(steps)s
    FROM fenced WHERE t.turn_id = %(turn_id)s AND t.settled_at IS NULL
    RETURNING t.turn_id, t.cancel_requested_at
    """,
)

# A cancellation that came while the turn was on its way here: somebody is to settle it.
BRING_BACK = Statement(
    "turns.bring_back",
    f"""
    UPDATE sessions SET not_before = NULL, woken_at = NULL
    WHERE {HELD}
    """,
)

# Their order of acceptance becomes the order in which the sweeper wakes them (see WAKE_DUE). `woken_at` is when that
# was written: it shows a clock that is set back later, which else would put `not_before` into the future again.
RECALL = Statement(
    "turns.recall",
    """
    WITH parked AS (
        SELECT s.session_id, t.accepted_at FROM turns AS t JOIN sessions AS s USING (session_id)
        WHERE t.settled_at IS NULL AND t.status = 'parked' AND s.not_before > perdure_now() AND s.queued_at IS NULL
        FOR NO KEY UPDATE OF s SKIP LOCKED
    )
    UPDATE sessions AS s SET not_before = least(parked.accepted_at, perdure_now()), woken_at = perdure_now()
    FROM parked WHERE s.session_id = parked.session_id
    RETURNING s.session_id
    """,
)

# A process that must leave now gives back whatever it holds: turns are parked; an ending, and a
# session that memories are drawn from, stay as far as they are.
RELEASE_ALL = Statement(
    "turns.release_all",
    f"""
    WITH fenced AS (
        UPDATE sessions AS s
        SET lease_until = NULL, lease_owner = NULL, woken_at = NULL,
            strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
            state = CASE WHEN s.state IN ('{State.SUMMARIZING}', '{State.ENDING}', '{State.ENDED}') THEN s.state
                         ELSE {sql(Trigger.TURN_STOPPED, column="s.state")} END
        FROM unnest(%(session_ids)s::uuid[], %(tokens)s::bigint[], %(nonces)s::uuid[])
                 AS mine (session_id, token, nonce)
        WHERE s.session_id = mine.session_id AND s.token = mine.token AND s.nonce = mine.nonce
        RETURNING s.session_id, s.state
    ), parked AS (
        UPDATE turns AS t SET status = 'parked' FROM fenced
        WHERE t.session_id = fenced.session_id AND t.settled_at IS NULL AND t.status = 'running'
    )
    SELECT session_id, state FROM fenced
    """,
)

# A session that goes on in a later slice takes its place behind its user's queued sessions (see ADMIT).
RELEASE = Statement(
    "turns.release",
    f"""
    WITH behind AS (
        SELECT %(woken)s AND mine.unsettled > 0 AND EXISTS (
                   SELECT FROM sessions AS q
                   WHERE q.user_id = mine.user_id AND q.unsettled > 0 AND q.queued_at IS NOT NULL) AS others
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

# --- approve -----------------------------------------------------------------------------

LOCK_HELD = Statement(
    "turns.lock_held",
    f"SELECT token FROM sessions WHERE {HELD} FOR NO KEY UPDATE",
)

# Gives the session back until the calls are decided, or expire. Nobody's attempt, and no claim. Not where an end or
# a cancellation was asked for meanwhile.
WAIT_APPROVAL = Statement(
    "turns.wait_approval",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = NULL, lease_owner = NULL, spent_s = %(spent_s)s, woken_at = perdure_now(), wakes = 0,
            paced = false,
            not_before = (SELECT min(decide_at) FROM tool_effects
                          WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s AND status = 'asked'),
            strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
            state = CASE state WHEN '{State.WAITING_APPROVAL}' THEN state ELSE {sql(Trigger.APPROVAL_NEEDED)} END
        WHERE {HELD} AND end_requested_at IS NULL
          AND NOT EXISTS (SELECT FROM turns WHERE turn_id = %(turn_id)s AND cancel_requested_at IS NOT NULL)
        RETURNING session_id
    )
    UPDATE turns AS t SET status = 'waiting_approval' FROM fenced WHERE t.turn_id = %(turn_id)s
    RETURNING t.turn_id
    """,
)

IS_CANCELLED = Statement(
    "turns.is_cancelled",
    "SELECT turn_id FROM turns WHERE turn_id = %(turn_id)s AND cancel_requested_at IS NOT NULL",
    writes=False,
)

_UNDECIDED = """
    (end_requested_at IS NULL AND EXISTS (
        SELECT FROM tool_effects
        WHERE turn_id = %(turn_id)s AND message_seq = %(message_seq)s AND status = 'asked'
          AND decide_at > perdure_now()))
""".strip()

# Begins what is approved, unless something is still to be decided. What can be decided no more is denied.
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

# Ids of calls are distinct within a turn; where a release before this one made them, the newest is meant.
FIND_CALL = Statement(
    "turns.find_call",
    """
    SELECT e.effect_id, e.tool, e.status, e.decide_at <= perdure_now() AS expired,
           t.agent, t.priority, t.status = 'waiting_approval' AS waits
    FROM turns AS t
    JOIN tool_effects AS e ON e.turn_id = t.turn_id
    JOIN messages AS m ON m.session_id = t.session_id AND m.seq = e.message_seq
    WHERE t.turn_id = %(turn_id)s AND m.tool_calls -> e.position ->> 'id' = %(call_id)s
    ORDER BY e.message_seq DESC LIMIT 1
    """,
    writes=False,
)

# A decision; where it was the last one, the session is anybody's. Returns a row then.
DECIDE = Statement(
    "turns.decide",
    f"""
    WITH decided AS (
        UPDATE tool_effects
        SET status = %(status)s, result = %(result)s, arguments = coalesce(%(arguments)s, arguments)
        WHERE effect_id = %(effect_id)s
    )
    UPDATE sessions SET not_before = NULL, queued_at = NULL, woken_at = NULL, state = {sql(Trigger.APPROVAL_DECIDED)}
    WHERE session_id = %(session_id)s
      AND NOT EXISTS (SELECT FROM tool_effects
                      WHERE turn_id = %(turn_id)s AND status = 'asked' AND effect_id <> %(effect_id)s)
    RETURNING session_id
    """,
)

# --- cancel ------------------------------------------------------------------------------

# A turn that has not begun is settled here and now; one that has is asked to stop, and waits for
# nothing any more. What is left without a turn is active again, whatever a runner was about to do
# when it died.
CANCEL = Statement(
    "turns.cancel",
    f"""
    WITH locked AS (
        SELECT s.session_id, s.tick FROM sessions AS s
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
        WHERE t.turn_id = %(turn_id)s AND t.settled_at IS NULL
        RETURNING t.turn_id, t.session_id, t.status, t.status = 'cancelled' AS settled, t.reply_to, t.priority
    ), released AS (
        UPDATE sessions AS s
        SET unsettled = s.unsettled - asked.settled::int, turn_count = s.turn_count + asked.settled::int,
            last_activity_at = CASE WHEN asked.settled THEN perdure_now() ELSE s.last_activity_at END,
            not_before = CASE WHEN asked.settled AND s.unsettled > 1 THEN s.not_before END,
            queued_at = CASE WHEN asked.settled AND s.unsettled > 1 THEN s.queued_at END,
            state = CASE WHEN asked.settled AND s.unsettled = 1
                         THEN {sql(Trigger.TURN_STOPPED, column="s.state")} ELSE s.state END
        FROM asked WHERE s.session_id = asked.session_id  -- whatever it was when this began: it may just be parked
        RETURNING asked.settled AND s.unsettled = 0 AND s.end_requested_at IS NOT NULL AS may_end
    ), owed AS (
        INSERT INTO deliveries (delivery_id, turn_id, target, status, due_at, created_at)
        SELECT %(delivery_id)s::uuid, turn_id, reply_to, 'pending', perdure_now(), perdure_now()
        FROM asked WHERE settled AND reply_to IS NOT NULL
        RETURNING delivery_id
    )
    SELECT asked.session_id, asked.status, asked.priority, (SELECT delivery_id FROM owed) AS delivery_id,
           coalesce((SELECT may_end FROM released), false) AS may_end
    FROM asked
    """,
)

# Takes a locked session away from whoever runs it; its turns are then settled by the taker.
SEIZE = Statement(
    "turns.seize",
    f"""
    UPDATE sessions AS s
    SET {RAISED}, lease_owner = NULL, lease_until = NULL, strikes = 0, claims = 0, not_before = NULL, queued_at = NULL
    WHERE session_id = %(session_id)s
    RETURNING token, nonce
    """,
)

# The same where nobody runs it: its turn waits.
SEIZE_WAITING = Statement(
    "turns.seize_waiting",
    f"""
    UPDATE sessions AS s SET {RAISED}, strikes = 0, claims = 0, not_before = NULL, queued_at = NULL
    WHERE session_id = %(session_id)s AND lease_until IS NULL
    RETURNING token, nonce
    """,
)

# The turn of a session that has begun and is not settled. Turns run one at a time in the order of `seq`, so it is
# the oldest unsettled one.
BEGUN = Statement(
    "turns.begun",
    """
    SELECT * FROM (
        SELECT turn_id, seq, user_id, agent, channel, first_seq, status, steps
        FROM turns WHERE session_id = %(session_id)s AND settled_at IS NULL ORDER BY seq LIMIT 1
    ) AS oldest
    WHERE status <> 'accepted'
    """,
    writes=False,
)

# The queued turns of a locked session whose outcome is owed to a receiver.
OWING = Statement(
    "turns.owing",
    """
    SELECT turn_id FROM turns
    WHERE session_id = %(session_id)s AND settled_at IS NULL AND status = 'accepted' AND reply_to IS NOT NULL
    ORDER BY seq
    """,
    writes=False,
)

# Settles every queued turn of a locked session as cancelled, however many there are, and writes their deliveries:
# `delivery_ids` are the ids for those of `turn_ids`.
CANCEL_QUEUED = Statement(
    "turns.cancel_queued",
    f"""
    WITH cancelled AS (
        UPDATE turns AS t
        SET cancel_requested_at = coalesce(t.cancel_requested_at, perdure_now()), status = 'cancelled',
            settled_at = perdure_now(), settled_tick = s.tick,
            error_code = 'TURN_CANCELLED', error_message = %(message)s
        FROM sessions AS s
        WHERE s.session_id = %(session_id)s AND t.session_id = %(session_id)s
          AND t.settled_at IS NULL AND t.status = 'accepted'
        RETURNING t.turn_id, t.reply_to
    ), counted AS (
        SELECT count(*) AS turns FROM cancelled
    ), released AS (
        UPDATE sessions AS s
        SET unsettled = s.unsettled - counted.turns, turn_count = s.turn_count + counted.turns,
            last_activity_at = perdure_now(),
            state = CASE WHEN s.unsettled = counted.turns
                         THEN {sql(Trigger.TURN_STOPPED, column="s.state")} ELSE s.state END
        FROM counted WHERE s.session_id = %(session_id)s AND counted.turns > 0
    )
    INSERT INTO deliveries (delivery_id, turn_id, target, status, due_at, created_at)
    SELECT owed.delivery_id, owed.turn_id, cancelled.reply_to, 'pending', perdure_now(), perdure_now()
    FROM unnest(%(delivery_ids)s::uuid[], %(turn_ids)s::uuid[]) AS owed (delivery_id, turn_id)
    JOIN cancelled USING (turn_id)
    RETURNING delivery_id
    """,
)

# --- sweep -------------------------------------------------------------------------------

# Whoever moves the row ahead sweeps this round.
TAKE_SWEEP = Statement(
    "sweep.take",
    """
    INSERT INTO sweeps AS s (name, due_at)
    VALUES (%(name)s, perdure_now() + make_interval(secs => %(every_s)s))
    ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at
    -- Or the server's clock was ahead for a while; by less, two rounds only began in another order than they ran.
    WHERE s.due_at <= perdure_now() OR s.due_at > excluded.due_at + interval '1 second'
    RETURNING s.name
    """,
)

_UNLEASED = """
              (lease_until IS NULL OR lease_until <= perdure_now()
               OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s * 2))
""".strip()

# Sessions with unsettled turns that no worker holds. A session is due `backoff_s` after its last wake-up, and
# after twice as long with each further one that no worker answered by a claim (`wakes`). By priority, then those
# woken less often, then those that wait longest: no session is woken twice while another waits for its first.
#
# `ready` reads sessions whose turn may run, `waiting` those whose turn waited for a person or a model until
# `not_before`, which is then the moment since which they wait. Of those that waited for a model (`paced`),
# `most_paced` a round are woken: a model that has just recovered must not be overrun. The claim may follow: that
# `not_before` is reached shows in the row alone, which is written here.
#
# Each pair (priority, level) is one range of `sessions_wake_idx`, read in its order up to the limit. The limit is a
# subquery because the planner, if it knew the number, would expect fewer rows than that in one range, and then
# read and sort the whole range. A moment in the future was written while the server's clock was ahead, and counts
# as past.
WAKE_DUE = Statement(
    "sweep.wake_due",
    f"""
    WITH ready AS (
        SELECT found.session_id, rank AS priority, found.wakes, found.since
        FROM generate_series(0, 9) AS rank, generate_series(0, 6) AS level, LATERAL (
            (SELECT session_id, wakes, coalesce(woken_at, '-infinity') AS since FROM sessions
             WHERE unsettled > 0 AND not_before IS NULL AND priority = rank AND least(wakes, 6) = level
               AND coalesce(woken_at, '-infinity')
                   <= perdure_now() - make_interval(secs => %(backoff_s)s * 2 ^ level)
               AND {_UNLEASED}
             ORDER BY coalesce(woken_at, '-infinity') LIMIT (SELECT %(most)s::bigint))
            UNION ALL
            (SELECT session_id, wakes, '-infinity' FROM sessions
             WHERE unsettled > 0 AND not_before IS NULL AND priority = rank AND least(wakes, 6) = level
               AND coalesce(woken_at, '-infinity') > perdure_now() + interval '1 second'
               AND {_UNLEASED}
             ORDER BY coalesce(woken_at, '-infinity') LIMIT (SELECT %(most)s::bigint))) AS found
    ), waiting AS (
        SELECT found.*
        FROM (VALUES (false, %(most)s::int), (true, least(%(most_paced)s::int, %(most)s::int))) AS kind (paced, most),
             LATERAL (
                 SELECT each.* FROM generate_series(0, 6) AS level, LATERAL (
                     SELECT session_id, priority, wakes, not_before AS since FROM sessions
                     WHERE unsettled > 0 AND not_before IS NOT NULL AND paced = kind.paced AND least(wakes, 6) = level
                       AND not_before <= perdure_now()
                           - make_interval(secs => CASE level WHEN 0 THEN 0 ELSE %(backoff_s)s * 2 ^ level END)
                       AND {_UNLEASED}
                     ORDER BY not_before LIMIT kind.most) AS each
                 ORDER BY each.wakes, each.since LIMIT kind.most) AS found
        UNION ALL
        (SELECT session_id, priority, wakes, '-infinity' FROM sessions
         WHERE unsettled > 0 AND not_before IS NOT NULL
           AND woken_at > perdure_now() + interval '1 second' AND not_before > perdure_now()
         ORDER BY woken_at LIMIT (SELECT %(most)s::bigint))
    ), due AS (
        SELECT session_id, priority, wakes, since FROM ready
        UNION ALL SELECT session_id, priority, wakes, since FROM waiting
        ORDER BY priority DESC, wakes, since
        LIMIT %(most)s
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
    SELECT session_id, priority FROM due JOIN marked USING (session_id) ORDER BY priority DESC, due.wakes, since
    """,
)

# The broker did not take these wake-ups: the sessions are due in the next round, as if they had not been woken.
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

# A worker took the wake-up and had no room. It counts, so that other sessions come first, but the pause stays
# short enough for a place that becomes free to be used.
CROWDED = Statement(
    "sweep.crowded",
    """
    UPDATE sessions SET woken_at = perdure_now(), wakes = least(greatest(wakes, 1), %(most_wakes)s)
    WHERE session_id = %(session_id)s
    """,
)

# --- deliver -----------------------------------------------------------------------------

# Attempts are apart by construction: whoever attempts has moved the due time ahead.
# Due further ahead than any pause is what a clock that was wrong for a while has said.
_DELIVERY_DUE = "(due_at <= perdure_now() OR due_at > perdure_now() + make_interval(secs => %(furthest_s)s))"

TAKE_DELIVERY = Statement(
    "deliveries.take",
    f"""
    UPDATE deliveries
    SET attempts = attempts + 1, due_at = perdure_now() + make_interval(secs => %(attempt_s)s),
        wake_at = NULL, wakes = 0
    WHERE delivery_id = %(delivery_id)s AND status = 'pending' AND {_DELIVERY_DUE}
    RETURNING turn_id, target, attempts, extract(epoch FROM perdure_now() - created_at)::float AS age_s
    """,
)

DELIVERED = Statement(
    "deliveries.delivered",
    """
    UPDATE deliveries SET status = 'delivered', delivered_at = perdure_now(), last_error = NULL
    WHERE delivery_id = %(delivery_id)s
    """,
)

# `forgiven`: the receiver was not asked, and the attempt does not count.
POSTPONE_DELIVERY = Statement(
    "deliveries.postpone",
    """
    UPDATE deliveries
    SET last_error = %(error)s,
        attempts = attempts - CASE WHEN %(forgiven)s THEN 1 ELSE 0 END,
        status = CASE WHEN %(retry_s)s::float IS NULL THEN 'failed' ELSE 'pending' END,
        due_at = perdure_now() + make_interval(secs => coalesce(%(retry_s)s::float, 0))
    WHERE delivery_id = %(delivery_id)s AND status = 'pending'
    """,
)

# Deliveries to publish, each with the moment before which it is not published again: the pause doubles while no
# worker attempts it. A moment further ahead than any pause was written while the server's clock was ahead.
DELIVERIES_DUE = Statement(
    "deliveries.due",
    """
    WITH due AS (
        (SELECT delivery_id, greatest(due_at, wake_at) AS since FROM deliveries
         WHERE status = 'pending' AND greatest(due_at, wake_at) <= perdure_now()
         ORDER BY greatest(due_at, wake_at) LIMIT (SELECT %(most)s::bigint))
        UNION ALL
        (SELECT delivery_id, greatest(due_at, wake_at) FROM deliveries
         WHERE status = 'pending'
           AND greatest(due_at, wake_at) > perdure_now() + make_interval(secs => %(furthest_s)s)
         ORDER BY greatest(due_at, wake_at) LIMIT (SELECT %(most)s::bigint))
        LIMIT %(most)s
    ), locked AS (
        SELECT delivery_id FROM deliveries
        WHERE delivery_id = ANY (ARRAY(SELECT delivery_id FROM due)) AND status = 'pending'
        FOR NO KEY UPDATE SKIP LOCKED
    ), marked AS (
        UPDATE deliveries
        SET wake_at = perdure_now() + make_interval(secs => %(backoff_s)s * 2 ^ least(wakes, 6)), wakes = wakes + 1
        WHERE delivery_id = ANY (ARRAY(SELECT delivery_id FROM locked))
        RETURNING delivery_id
    )
    SELECT delivery_id FROM due JOIN marked USING (delivery_id) ORDER BY since
    """,
)

# The broker did not take these: they are due in the next round.
UNWAKE_DELIVERIES = Statement(
    "deliveries.unwake",
    """
    UPDATE deliveries SET wake_at = NULL, wakes = greatest(wakes - 1, 0)
    WHERE delivery_id = ANY (%(delivery_ids)s::uuid[]) AND status = 'pending'
    """,
)

# --- read --------------------------------------------------------------------------------

_TURN = """
    SELECT t.turn_id, t.session_id, t.seq, t.user_id, t.status, t.attempts,
           CASE WHEN t.settled_at IS NULL AND t.first_seq IS NOT NULL THEN (
                SELECT count(*) FROM messages AS m
                WHERE m.session_id = t.session_id AND m.seq >= t.first_seq AND m.role = 'assistant')
                ELSE t.steps END AS steps,
           t.steps AS steps_when_parked,
           CASE WHEN t.status = 'parked' THEN (
                SELECT not_before FROM sessions
                WHERE session_id = t.session_id AND queued_at IS NULL) END AS not_before,
           r.content AS reply, t.error_code, t.error_message, t.usage, t.channel, t.agent,
           CASE WHEN t.status = 'waiting_approval' THEN (
                SELECT jsonb_agg(jsonb_build_object('call_id', m.tool_calls -> e.position ->> 'id', 'tool', e.tool,
                                                    'arguments', e.arguments, 'expires_at', e.decide_at)
                                 ORDER BY e.position)
                FROM tool_effects AS e JOIN messages AS m ON m.session_id = t.session_id AND m.seq = e.message_seq
                WHERE e.turn_id = t.turn_id AND e.status = 'asked' AND e.decide_at > perdure_now()
                  AND (SELECT end_requested_at IS NULL FROM sessions WHERE session_id = t.session_id))
                END AS pending_approvals,
           t.accepted_at, t.started_at, t.settled_at
    FROM turns AS t LEFT JOIN messages AS r ON r.session_id = t.session_id AND r.seq = t.reply_seq
"""

READ = Statement("turns.read", _TURN + " WHERE t.turn_id = %(turn_id)s", writes=False)


def _list(name: str, chosen: str, order: str = "t.turn_id") -> Statement:
    """The newest turns of those `chosen`, at most `limit`; an index has them in this order."""
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
           t.error_code, t.error_message, t.accepted_at, t.started_at, t.settled_at
    FROM turns AS t
"""

LIST = _list("list", f"{_LISTED} WHERE true")
LIST_OF_USER = _list("list_of_user", f"{_LISTED} WHERE t.user_id = %(user_id)s")
LIST_OF_TENANT = _list("list_of_tenant", f"{_LISTED} WHERE {OF_TENANT.format(column='t.user_id')}")
LIST_OF_SESSION = _list("list_of_session", f"{_LISTED} WHERE t.session_id = %(session_id)s", "t.seq")
LIST_ERRORS = _list("list_errors", f"{_LISTED} WHERE t.error_code IS NOT NULL")
# Reads all unsettled turns: walking back through all turns, the oldest of them may be far away.
LIST_UNSETTLED = _list(
    "list_unsettled",
    f"WITH t AS MATERIALIZED ({_LISTED} WHERE t.settled_at IS NULL) SELECT * FROM t WHERE true",
)

OWNER = Statement("turns.owner", "SELECT user_id FROM turns WHERE turn_id = %(turn_id)s::uuid", writes=False)

HELD_TURNS = Statement(
    "turns.held_turns",
    """
    SELECT turn_id, held_error FROM turns
    WHERE session_id = %(session_id)s AND settled_at IS NULL AND held_error IS NOT NULL
    """,
    writes=False,
)

SETTLED_AMONG = Statement(
    "turns.settled_among",
    "SELECT turn_id FROM turns WHERE turn_id = ANY (%(turn_ids)s::uuid[]) AND settled_at IS NOT NULL",
    writes=False,
)

# --- feedback ----------------------------------------------------------------------------

# Notes what a person said of a turn that has a reply, and returns what was asked and answered. The
# user's row is held, so that an erasure comes before this or after what is learnt from it.
FEEDBACK = Statement(
    "turns.feedback",
    """
    WITH held AS (
        SELECT u.user_id FROM users AS u
        WHERE u.user_id = (SELECT user_id FROM turns WHERE turn_id = %(turn_id)s) FOR KEY SHARE
    ), told AS (
        UPDATE turns AS t SET feedback = %(feedback)s::jsonb FROM held
        WHERE t.turn_id = %(turn_id)s AND t.reply_seq IS NOT NULL
        RETURNING t.session_id, t.turn_id, held.user_id, t.agent, t.status, t.first_seq, t.reply_seq
    )
    SELECT told.user_id, told.agent, told.status, reply.content AS reply,
           (SELECT string_agg(m.content, E'\\n' ORDER BY m.seq) FROM messages AS m
            WHERE m.session_id = told.session_id AND m.seq BETWEEN told.first_seq AND told.reply_seq
              AND m.turn_id = told.turn_id AND m.role = 'user') AS asked
    FROM told JOIN messages AS reply ON reply.session_id = told.session_id AND reply.seq = told.reply_seq
    """,
)
