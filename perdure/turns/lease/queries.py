"""The statements that claim, renew, park and release a session. Each write is conditional on the fence."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import HELD, RAISED
from perdure.sessions.states import State, Trigger, sql
from perdure.snapshots.queries import PRESENT_VARIABLES
from perdure.turns.drain import CLOSED

# A session is *admitted* while it may run its turns or does: it counts against `user_concurrency`, the turns of its
# user that run at once. With as many admitted, a further session of the user is *queued*: no wake-up is published for
# it, and no worker claims it, until a settled turn of the user admits it (ADMIT) or the sweeper does (ADMIT_DUE).
#
# What waits for a person or a model (`not_before`), or after an error (`strikes`), takes no place. A session without
# such a wait is in `sessions_admitted_idx`, which admission keeps short.
ADMITTED = """
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
            SELECT FROM sessions WHERE user_id = %(user_id)s AND {ADMITTED}
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
                SELECT FROM sessions WHERE user_id = few.user_id AND {ADMITTED}
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

# The store would not take the snapshot: the session is given back, for the sweeper to wake again,
# later than the last time (see WAKE_DUE).
POSTPONE = Statement(
    "turns.postpone",
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
