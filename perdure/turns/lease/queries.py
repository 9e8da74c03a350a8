"""The statements that claim a session, renew its lease and share the workers; `leave_queries` has those that end it.

A worker that holds a session writes to the session only on the condition that the worker's fence is still valid.
"""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import HELD, RAISED, UNLEASED
from perdure.database.keyed import keyed
from perdure.database.pausing import PAUSED, PAUSED_SESSION
from perdure.database.rounds import visiting
from perdure.sessions.states import Trigger, sql
from perdure.snapshots.queries import PRESENT_VARIABLES
from perdure.turns.drain import DRAINING
from perdure.turns.lease.aging import HIGHEST, effective

ISOLATE_FROM_CLAIM = 2
"""After this number of claims of a turn, only a dedicated process may claim it."""

# A session is *admitted* while one of its turns runs or may run. An admitted session takes one of its user's
# `user_concurrency` places. If all places are taken, the user's other sessions that have unsettled turns are *queued*:
# no wake-up is published for a queued session, and no worker claims it. A queued session is admitted after a turn of
# its user is settled (ADMIT), or by the sweeper (ADMIT_DUE).
#
# A session takes no place while it waits for a person, a task, a time or a model (`not_before`), for a worker that has
# its agent and tools (`unequipped_since`), or after an error (`strikes`). The index `sessions_admitted_idx` has the
# admitted sessions. The index stays short, because queued sessions are not in it.
#
# A session in which an agent answers a call of another (`depth`) takes no place and is not queued for want of one: its
# caller's turn waits for it.
#
# A session whose turn is paused (see `turns.pauses`) is queued, too, and not admitted before the pause ends.
ADMITTED = """
        unsettled > 0 AND not_before IS NULL AND depth = 0
        AND (lease_until IS NOT NULL OR strikes = 0 AND unequipped_since IS NULL)
""".strip()

# The places of a user that admitted sessions take: a row for each, up to the limit.
PLACES = f"""
    (SELECT FROM sessions WHERE user_id = {{user_id}} AND {ADMITTED}
     LIMIT (SELECT %(user_concurrency)s::bigint)) AS admitted
""".strip()

# The sessions that any worker may take without a wake-up of their own, in the order of CLAIM_DUE. The others need the
# wake-up that names them: those that were woken already (`wakes`), failed or ended a process (`strikes`, `claims`),
# were left by a worker without their agent, or whose holder has died. `accept` and the sweeper then publish it.
DRAINABLE = f"""
    unsettled > 0 AND not_before IS NULL AND wakes = 0 AND lease_until IS NULL AND strikes = 0
    AND claims < {ISOLATE_FROM_CLAIM} AND unequipped_since IS NULL
""".strip()

# Queues a session. Because `not_before` is one hour ahead, the sweeper's WAKE_DUE does not wake the session. The hour
# passes only if no worker runs ADMIT_DUE, for example because all workers run the previous release. The worker that
# queues the session has the turn's agent.
_QUEUE = """queued_at = coalesce(s.queued_at, perdure_now()), not_before = perdure_now() + interval '1 hour',
            woken_at = perdure_now(), wakes = 0, paced = false, unequipped_since = NULL"""

# The sessions whose turn waits for a model, and the model's name, as in the index `sessions_parked_idx`.
PARKED = "unsettled > 0 AND not_before IS NOT NULL AND paced"
PARKED_FOR = "coalesce(parked_for, '')"

# A user's queued sessions in the order of admission: highest effective priority first, then longest wait. For each
# priority, one range of `sessions_queued_idx` is read up to the limit.
_NEXT = f"""
    SELECT found.session_id FROM generate_series(0, {HIGHEST}) AS rank, LATERAL (
        SELECT session_id, priority, queued_at FROM sessions
        WHERE user_id = {{user_id}} AND unsettled > 0 AND queued_at IS NOT NULL AND priority = rank
              AND NOT {PAUSED_SESSION.format(session="sessions")}
        ORDER BY queued_at LIMIT {{most}}) AS found
    ORDER BY {effective("found.priority", "found.queued_at")} DESC, found.queued_at
""".strip()

_ADMIT = f"""
    UPDATE sessions AS s
    SET queued_at = NULL, not_before = NULL, woken_at = perdure_now(), wakes = 0
    FROM locked WHERE s.session_id = locked.session_id
    RETURNING s.session_id, {effective("s.priority", "locked.queued_at")} AS priority,
              {DRAINABLE} AS is_drainable
""".strip()

# Admits one queued session of a user, if the user has a free place. If two places become free concurrently, two
# statements admit two sessions: each statement skips the row that the other has locked.
ADMIT = Statement(
    "turns.admit",
    f"""
    WITH taken AS (
        SELECT count(*) AS places FROM {PLACES.format(user_id="%(user_id)s")}
    ), next AS (
        {_NEXT.format(user_id="%(user_id)s", most="%(user_concurrency)s::bigint")}
    ), locked AS (
        SELECT s.session_id, s.queued_at FROM sessions AS s
        WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM next))
              AND {keyed("s.unsettled > 0 AND s.queued_at IS NOT NULL")}
        ORDER BY {effective("s.priority", "s.queued_at")} DESC, s.queued_at
        LIMIT CASE WHEN (SELECT places FROM taken) < %(user_concurrency)s THEN 1 ELSE 0 END
        FOR NO KEY UPDATE SKIP LOCKED
    )
    {_ADMIT}
    """,
)

# The place of a session's user in the order of the sweeper's rounds, as in the index `sessions_queued_place_idx`.
_USER = "md5(user_id) || user_id"

# Run by the sweeper: admits queued sessions of all users who have free places, with an equal share for each user. A
# round visits at most `most_users` users, and the next round continues behind them.
ADMIT_DUE = Statement(
    "sweep.admit_due",
    f"""
    WITH RECURSIVE {
        visiting(
            "admissions",
            table="sessions",
            place=f"({_USER})",
            where=keyed("unsettled > 0 AND queued_at IS NOT NULL"),
            most="%(most_users)s",
        )
    },
    free AS MATERIALIZED (
        SELECT each.user_id, each.places FROM (
            SELECT few.user_id,
                   %(user_concurrency)s - (SELECT count(*) FROM {PLACES.format(user_id="few.user_id")}) AS places
            FROM (SELECT substr(place, 33) AS user_id FROM visited) AS few) AS each
        WHERE each.places > 0
    ), share AS (
        SELECT ceil(%(most)s::float / count(*))::bigint AS most FROM free HAVING count(*) > 0
    ), due AS (
        SELECT chosen.session_id FROM free, share, LATERAL (
            {_NEXT.format(user_id="free.user_id", most="least(free.places, share.most)")}
            LIMIT least(free.places, share.most)) AS chosen
        LIMIT %(most)s
    ), locked AS (
        SELECT session_id, queued_at FROM sessions
        WHERE session_id = ANY (ARRAY(SELECT session_id FROM due)) AND queued_at IS NOT NULL
        FOR NO KEY UPDATE SKIP LOCKED
    )
    {_ADMIT}
    """,
)

# No worker claims a session before its `not_before`, even if a wake-up arrives. Exception: if `woken_at`, the time of
# the last wake-up, is in the future, `not_before` is ignored. In this case, both times were written while PostgreSQL's
# clock was ahead.
_IN_TIME = """
          (not_before IS NULL OR not_before <= perdure_now() OR woken_at > perdure_now() + interval '1 second')
""".strip()

# Columns for the prompt: the previous session with its summary, and the channel of the previous turn. For a session's
# first turn, the previous turn is the last turn of the previous session. Columns for the runner: the session's state
# between turns.
_BEFORE = f"""
           {{held}}.previous_session_id, previous.summary AS previous_summary,
           coalesce(
               (SELECT channel FROM turns WHERE session_id = {{held}}.session_id AND seq < begun.seq
                ORDER BY seq DESC LIMIT 1),
               (SELECT channel FROM turns WHERE session_id = {{held}}.previous_session_id ORDER BY seq DESC LIMIT 1)
           ) AS previous_channel,
           {{held}}.tick, {{held}}.saved_token, {{held}}.saved_tick, {{held}}.variables_tick,
           {PRESENT_VARIABLES} AS variables
""".strip()

# The turn `t` is the oldest unsettled turn of a session.
IS_OLDEST = f"""
    t.turn_id = (SELECT turn_id FROM turns WHERE session_id = {{session}} AND settled_at IS NULL ORDER BY seq LIMIT 1)
          AND {keyed("t.settled_at IS NULL")}
""".strip()

# What a claim and BEGIN_NEXT return of the turn `t` that has begun.
_BEGUN = """
        RETURNING t.turn_id, t.seq, t.user_id, t.agent, t.channel, t.first_seq, t.cancel_requested_at,
                  t.started_at, t.metadata::text AS metadata, t.additions::text AS additions,
                  t.unsaved::text AS unsaved, t.attempt_error, t.traceparent
""".strip()

# Takes a session's lease, and begins or takes over the session's oldest unsettled turn. Claims nothing if the session's
# row is locked. A lease that expires more than twice `lease_s` from now was written while the server's clock was ahead,
# and counts as expired. After `isolate_from` claims of a turn, only a dedicated process may claim it. While the intake
# is closed, no claim succeeds.
#
# If the holder of the expired lease has died, the death must first be charged to a turn (`blamed`; see BLAME in
# `death_queries`).
#
# A worker claims no turn of an agent that is not among its `fingerprints` (NULL: all), unless the turn needs no agent
# or has waited for `unknown_agent_s`. If turns are `pinned`, the same holds for a turn that a worker with another
# fingerprint of the agent has begun. A refused session keeps a short pause between two wake-ups (`wakes`), so that it
# soon reaches a worker that knows the agent.
#
# If leased sessions of the user take all places, or the turn is paused, the session is queued instead, and no attempt
# is counted. No lock protects the count of leased sessions: concurrent claims for one user do not see each other. So
# the user may exceed the limit until enough of these turns are settled. A turn that is cancelled or out of attempts
# needs no place, because the turn is not run, only settled.
#
# `may_overtake`: turns of other sessions wait for a model and are due, and this turn was not returned to its model (see
# OVERTAKES).
#
# `_CLAIMING` is common to CLAIM, which takes the session with a given id, and CLAIM_DUE. Each has its own `candidate`.
_CANDIDATE = """
        SELECT session_id, user_id, strikes, claims, wakes, not_before, queued_at, paced, priority, token, nonce, depth,
               lease_owner,
               lease_until IS NULL OR lease_owner IS NULL OR blamed_token IS NOT DISTINCT FROM token AS blamed,
               unequipped_since <= perdure_now() - make_interval(secs => %(unknown_agent_s)s) AS overdue,
               lease_until IS NULL AS unleased
        FROM sessions
""".strip()

_CLAIMING = f"""
    oldest AS (
        SELECT turn_id, agent, fingerprint, accepted_at, unsaved IS NOT NULL AS unsaved,
               cancel_requested_at IS NOT NULL AS cancelled,
               CASE WHEN started_at IS NULL THEN extract(epoch FROM perdure_now() - accepted_at)::float END AS waited_s
        FROM turns WHERE session_id = {{session}} AND settled_at IS NULL ORDER BY seq LIMIT 1
    ), known AS (
        SELECT %(fingerprints)s::jsonb IS NULL OR candidate.strikes >= %(max_attempts)s
               OR coalesce((
                   SELECT coalesce(%(fingerprints)s::jsonb ->> agent = CASE WHEN %(pinned)s THEN fingerprint END,
                                   %(fingerprints)s::jsonb ? agent) OR unsaved OR cancelled FROM oldest), true)
               OR coalesce(candidate.overdue, false) AS equipped
        FROM candidate
    ), refused AS (
        UPDATE sessions AS s
        SET unequipped_since = coalesce(least(s.unequipped_since, perdure_now()), perdure_now()),
            wakes = least(s.wakes, 1), woken_at = coalesce(s.woken_at, perdure_now())
        FROM candidate, known
        WHERE s.session_id = candidate.session_id AND NOT known.equipped
    ), share AS (
        SELECT (count(*) < %(user_concurrency)s OR (SELECT depth > 0 FROM candidate))
               AND NOT coalesce((
                   SELECT {PAUSED.format(user_id="candidate.user_id", agent="oldest.agent")} AND NOT oldest.unsaved
                   FROM candidate, oldest), false)
               OR (SELECT strikes >= %(max_attempts)s FROM candidate)
               OR coalesce((SELECT cancelled FROM oldest), false) AS free
        FROM (
            SELECT FROM sessions
            WHERE user_id = (SELECT user_id FROM candidate) AND unsettled > 0 AND not_before IS NULL AND depth = 0
              AND lease_until > perdure_now()
              AND lease_until <= perdure_now() + make_interval(secs => %(lease_s)s::float * 2)
            LIMIT (SELECT %(user_concurrency)s::bigint)) AS running
    ), queued AS (
        UPDATE sessions AS s
        SET {_QUEUE}
        FROM candidate, known, share
        WHERE s.session_id = candidate.session_id AND candidate.blamed AND known.equipped AND NOT share.free
        RETURNING candidate.not_before IS NOT NULL AND candidate.queued_at IS NULL AS waited
    ), deferred AS (
        -- The turn has waited for a task or a time. The claim after this one counts what this one would not (`waited`).
        UPDATE turns AS t SET attempts = t.attempts - 1
        FROM queued
        WHERE queued.waited AND t.status = 'parked' AND t.error_code IS NULL AND {IS_OLDEST}
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
        FROM candidate, known, share
        WHERE s.session_id = candidate.session_id AND candidate.claims < %(isolate_from)s
          AND candidate.blamed AND known.equipped AND share.free
        RETURNING s.session_id, s.token, s.nonce, s.strikes, s.spent_s, s.message_count, s.previous_session_id, s.tick,
                  s.saved_token, s.saved_tick, s.variables_tick,
                  candidate.not_before IS NOT NULL AND candidate.queued_at IS NULL AS waited,
                  candidate.lease_owner AS lost
    ), begun AS (
        UPDATE turns AS t
        SET status = 'running',
            -- Not counted after a wait for a person, a task, a time or a model (error code: see WAIT_MODEL).
            attempts = t.attempts + (t.unsaved IS NULL AND t.status <> 'waiting_approval' AND NOT claimed.waited
                                     AND NOT (t.status = 'parked' AND t.error_code IS NOT NULL))::int,
            started_at = coalesce(t.started_at, perdure_now()),
            first_seq = coalesce(t.first_seq, claimed.message_count + 1),
            takeovers = CASE WHEN claimed.lost IS NULL THEN t.takeovers ELSE coalesce(t.takeovers, '[]')
                || jsonb_build_object('at', perdure_now(), 'owner', %(owner)s::text, 'lost', claimed.lost) END,
            fingerprint = coalesce(%(fingerprints)s::jsonb ->> t.agent, t.fingerprint)
        FROM claimed
        WHERE {IS_OLDEST}
        {_BEGUN}
    )
""".strip()

_CLAIMED = f"""
           candidate.strikes AS strikes_before, candidate.claims AS claims_before, candidate.wakes AS wakes_before,
           NOT (candidate.paced AND candidate.not_before IS NOT NULL AND candidate.wakes > 0) AND EXISTS (
               SELECT FROM sessions
               WHERE unsettled > 0 AND not_before IS NOT NULL AND paced AND least(wakes, 6) = 0
                 AND not_before <= perdure_now()) AS may_overtake,
           candidate.token AS token_before, candidate.nonce AS nonce_before, candidate.priority, candidate.blamed,
           known.equipped, share.free,
           coalesce(candidate.overdue, false) AS overdue,
           CASE WHEN candidate.unleased THEN (SELECT turn_id FROM oldest WHERE cancelled) END AS cancelled_id,
           (SELECT agent FROM oldest) AS agent_wanted, (SELECT fingerprint FROM oldest) AS fingerprint_wanted,
           NOT candidate.unleased AS taken_over, (SELECT waited_s FROM oldest) AS waited_s,
           claimed.token, claimed.nonce, claimed.strikes, claimed.spent_s, begun.*,
           {_BEFORE.format(held="claimed")}
""".strip()

# The commit of a claim does not wait until it is on disk. If PostgreSQL crashes first, nobody has claimed the session,
# and the claim's nonce matches no later one, so its holder commits nothing more. Each commit of a step waits, and a
# claim is on disk once a later commit is: a worker begins no tool under a claim that a crash can take back. The claim
# of a turn that is older than a minute waits, too: if the turn itself crashes PostgreSQL, its attempts must count.
# BEGIN_NEXT waits: it raises no fence, so its holder would go on with a turn that has not begun.
_LAZILY = """
           CASE WHEN (SELECT abs(extract(epoch FROM perdure_now() - accepted_at)) < 60 FROM oldest)
                THEN set_config('synchronous_commit', 'off', true) END AS lazily
""".strip()

CLAIM = Statement(
    "turns.claim",
    f"""
    WITH candidate AS (
        {_CANDIDATE}
        WHERE session_id = %(session_id)s AND unsettled > 0 AND {UNLEASED} AND {_IN_TIME} AND NOT {DRAINING}
        FOR NO KEY UPDATE SKIP LOCKED
    ), {_CLAIMING.format(session="%(session_id)s")}
    SELECT {_LAZILY}, {_CLAIMED}
    FROM candidate CROSS JOIN known CROSS JOIN share LEFT JOIN claimed USING (session_id) LEFT JOIN begun ON true
         LEFT JOIN sessions AS previous ON previous.session_id = claimed.previous_session_id
    """,
)

_SINCE = "coalesce(woken_at, last_activity_at)"

# The sessions that any drain may take. For each priority, one range of `sessions_due_idx` is read in index order, up to
# `most` sessions.
_DRAINED = f"""
        FROM generate_series(0, {HIGHEST}) AS rank, LATERAL (
            SELECT session_id, {_SINCE} AS since FROM sessions
            WHERE {DRAINABLE} AND priority = rank AND least(wakes, 6) = 0
            ORDER BY coalesce(woken_at, '-infinity') LIMIT (SELECT {{most}}::bigint)) AS found
        WHERE NOT {DRAINING}
""".strip()

# Like CLAIM, for the next due session: highest effective priority first, then longest wait. If the session
# `session_id`, which a wake-up has named, can be claimed and is not drainable, claims nothing and returns `is_special`:
# the caller then runs CLAIM.
#
# Concurrent statements choose the same sessions, up to `most`, and each claims the first one that no other has locked.
# `due` is the number of chosen ones: if it is positive and no session is claimed, others have locked all of them.
# `names_due`: the session that was named is one of them. `next_id` is another due session, with its effective priority.
CLAIM_DUE = Statement(
    "turns.claim_due",
    f"""
    WITH special AS (
        SELECT FROM sessions
        WHERE session_id = %(session_id)s::uuid AND unsettled > 0 AND {UNLEASED} AND {_IN_TIME} AND NOT ({DRAINABLE})
    ), due AS MATERIALIZED (
        SELECT found.session_id, {effective("rank", "found.since")} AS level, found.since
        {_DRAINED.format(most="%(most)s")}
        ORDER BY level DESC, since LIMIT %(most)s
    ), candidate AS (
        {_CANDIDATE}
        WHERE session_id = ANY (ARRAY(SELECT session_id FROM due)) AND {keyed(DRAINABLE)}
              AND NOT EXISTS (SELECT FROM special)
        ORDER BY {effective("priority", _SINCE)} DESC, {_SINCE}
        LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
    ), {_CLAIMING.format(session="(SELECT session_id FROM candidate)")}
    SELECT {_LAZILY}, EXISTS (SELECT FROM special) AS is_special, (SELECT count(*) FROM due) AS due,
           EXISTS (SELECT FROM due WHERE session_id = %(session_id)s::uuid) AS names_due,
           next.session_id AS next_id, next.level AS next_priority, candidate.session_id,
           {_CLAIMED}
    FROM (VALUES (true)) AS always LEFT JOIN (candidate CROSS JOIN known CROSS JOIN share) ON true
         LEFT JOIN claimed USING (session_id) LEFT JOIN begun ON true
         LEFT JOIN sessions AS previous ON previous.session_id = claimed.previous_session_id
         LEFT JOIN LATERAL (
             SELECT session_id, level FROM due WHERE session_id IS DISTINCT FROM candidate.session_id
             ORDER BY level DESC, since LIMIT 1) AS next ON true
    """,
)

# The next session that a drain would claim.
NEXT_DUE = Statement(
    "turns.next_due",
    f"""
    SELECT found.session_id, {effective("rank", "found.since")} AS priority
    {_DRAINED.format(most="1")}
    ORDER BY priority DESC, found.since LIMIT 1
    """,
    writes=False,
)

# Whether a session can be claimed. If it can, but CLAIM has just returned no row, CLAIM skipped a locked row.
CLAIMABLE = Statement(
    "turns.claimable",
    f"""
    SELECT unsettled > 0 AND NOT {DRAINING} AND {_IN_TIME}
           AND {UNLEASED} AS claimable
    FROM sessions WHERE session_id = %(session_id)s
    """,
    writes=False,
)

# Begins the next turn of a session that the caller holds. If a turn is running, reads that turn again instead: its
# runner may not know whether a commit succeeded. While the intake is closed or the turn is paused, no turn begins, but
# a running turn continues.
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
            attempts = t.attempts + (t.status NOT IN ('running', 'waiting_approval') AND t.unsaved IS NULL)::int,
            started_at = coalesce(t.started_at, perdure_now()),
            first_seq = coalesce(t.first_seq, fenced.message_count + 1),
            fingerprint = coalesce(%(fingerprints)s::jsonb ->> t.agent, t.fingerprint)
        FROM fenced
        WHERE {IS_OLDEST.format(session="%(session_id)s")}
          AND (t.status = 'running'
               OR NOT {DRAINING} AND NOT {PAUSED.format(user_id="t.user_id", agent="t.agent")})
        {_BEGUN}
    )
    SELECT fenced.strikes, fenced.spent_s, 0 AS wakes_before, begun.*,
           {_BEFORE.format(held="fenced")}
    FROM fenced LEFT JOIN begun ON true
         LEFT JOIN sessions AS previous ON previous.session_id = fenced.previous_session_id
    """,
)

# Renews all leases of a process. Skips locked rows, which the keeper's next beat renews. `lease_until IS NOT NULL`
# excludes a lease that was released concurrently: if it were renewed, no worker could claim the session until the lease
# expires.
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

# The present fence of each session that a process holds, and whether the session's turn is cancelled.
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

# Like WATCH, for turns that run in a dedicated process. The worker that started the process runs this statement,
# because the process may hang.
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

# Makes all turns due that wait for a model. The sweeper wakes them in the order of acceptance (see WAKE_DUE), those
# included whose time had already come. `woken_at` is set to the present time. If a later statement finds `woken_at` in
# the future, the clock was set back in between, and `not_before` is ignored (see `_IN_TIME`).
RECALL = Statement(
    "turns.recall",
    """
    WITH parked AS (
        SELECT s.session_id, t.accepted_at FROM turns AS t JOIN sessions AS s USING (session_id)
        WHERE t.settled_at IS NULL AND t.status = 'parked' AND s.not_before IS NOT NULL AND s.queued_at IS NULL
          AND s.paced AND (s.wakes = 0 OR s.not_before > perdure_now())
        FOR NO KEY UPDATE OF s SKIP LOCKED
    )
    UPDATE sessions AS s SET not_before = least(parked.accepted_at, perdure_now()), woken_at = perdure_now()
    FROM parked WHERE s.session_id = parked.session_id
    RETURNING s.session_id
    """,
)

# Whether more turns than `most` wait for the model `model`, are due and were not returned to the model yet.
OVERTAKES = Statement(
    "turns.overtakes",
    f"""
    SELECT count(*) > %(most)s AS overtakes FROM (
        SELECT FROM sessions
        WHERE {PARKED} AND {PARKED_FOR} = %(model)s AND least(wakes, 6) = 0 AND not_before <= perdure_now()
        LIMIT (SELECT %(most)s::bigint + 1)) AS earlier
    """,
    writes=False,
)

# Whether the session's turn still waits for a worker that has its agent and tools. A turn that has waited for
# `unknown_agent_s` fails at the next claim, whichever worker claims it.
IS_UNEQUIPPED = Statement(
    "turns.is_unequipped",
    """
    SELECT coalesce(unequipped_since > perdure_now() - make_interval(secs => %(unknown_agent_s)s), false)
           AND NOT coalesce((
               SELECT cancel_requested_at IS NOT NULL FROM turns AS t
               WHERE t.session_id = s.session_id AND settled_at IS NULL ORDER BY seq LIMIT 1), false) AS unequipped
    FROM sessions AS s WHERE session_id = %(session_id)s
    """,
    writes=False,
)

# Of the sessions whose turns returned to a model: those whose turn waits again, because the model has failed; those
# whose turn no worker has claimed, or is in its first model call since the claim; and those whose turn the model has
# answered. None of these is a turn whose wake-up was undone (`woken_at` is null, see UNWAKE), that a worker released
# before the model had answered, or that no worker could take because it lacks the turn's agent.
RETURNED = Statement(
    "sweep.returned",
    """
    SELECT session_id, paced AND not_before IS NOT NULL AND wakes = 0 AND woken_at IS NOT NULL AS failed,
           paced AND unsettled > 0 AND unequipped_since IS NULL
           AND CASE WHEN not_before IS NULL THEN lease_until IS NOT NULL ELSE wakes > 0 END
           AS unanswered,
           NOT paced OR unsettled = 0 AS answered
    FROM sessions WHERE session_id = ANY (%(session_ids)s::uuid[])
    """,
    writes=False,
)

KEEP_PACES = Statement("sweep.keep_paces", "UPDATE sweeps SET paces = %(paces)s::jsonb WHERE name = 'turns'")
