"""The statements that accept a message. In the common case, only ENQUEUE runs."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import RAISED
from perdure.database.keyed import keyed
from perdure.sessions.states import State, Trigger, sql
from perdure.turns.calls.queries import MAY_ASK
from perdure.turns.lease.queries import DRAINABLE, PLACES

# Whether a wake-up for the session was published recently. If so, the next message publishes no wake-up: a second one
# would only lengthen the queue, and the sweeper replaces a lost one. Both the time that counts as recent and the pause
# of the sweeper double with each wake-up that no claim follows. But `least(wakes, 2)` bounds the time that counts as
# recent. So after many such wake-ups, a message wakes the session before the sweeper does.
_WOKEN = """
    (s.woken_at <= perdure_now()
     AND s.woken_at > perdure_now() - make_interval(secs => %(sweep_s)s * 2 ^ least(s.wakes, 2)))
""".strip()

# Whether the session has failed attempts (see STRIKE) and only the sweeper wakes it: messages do not shorten the pause.
_STRUCK = "s.lease_until IS NULL AND s.strikes > 0 AND s.woken_at IS NOT NULL"

# The turn's additions: the message's, and that nothing of a session is remembered whose conversation is left out.
_ADDITIONS = """
    CASE WHEN {remember} THEN %(additions)s::jsonb
         ELSE coalesce(%(additions)s::jsonb, '{{}}') || '{{"remember": false}}' END
""".strip()
_REMEMBER = "(SELECT remember FROM sessions WHERE session_id = %(session_id)s)"

# Accepts a message into an existing session. If this process does not have the session's agent, the default agent is
# used (`lacking`): the installation may no longer have the agent, and its conversations go on. Returns no row if the
# message needs a decision first: the session does not exist, has ended, was idle for too long, or is busy while
# `on_busy` is neither `enqueue` nor `steer`; the message may answer a question (`answers`) for which the session's turn
# waits; the statement runs `alone`, and the session's turn may wait for its client, which HASTEN in the same
# transaction shortens; or the message was accepted before. The turn of a message that steers (`steers`) waits like any
# other, until the turn that runs takes its message in (see STEP).
ENQUEUE = Statement(
    "turns.enqueue",
    f"""
    WITH share AS (
        SELECT count(*) >= %(user_concurrency)s AS taken FROM {PLACES.format(user_id="%(user_id)s")}
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
            -- The user's other sessions take all places: this one is queued without a wake-up (see ADMIT).
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
          AND {keyed("s.user_id = %(user_id)s AND s.end_requested_at IS NULL")} AND s.depth = 0
          AND (%(session_id)s::uuid IS NOT NULL OR s.unsettled > 0
               OR s.last_activity_at > perdure_now() - make_interval(secs => %(idle_s)s))
          AND (%(on_busy)s IN ('enqueue', 'steer') OR s.unsettled = 0)
          AND NOT (%(answers)s AND s.unsettled > 0 AND EXISTS (
                {MAY_ASK.format(session_id="s.session_id")} OFFSET 0))  -- once per session, by its index
          AND NOT (%(alone)s AND s.unsettled > 0 AND coalesce(s.not_before > perdure_now(), false))
          AND NOT EXISTS (
                SELECT FROM inbox
                WHERE user_id = %(user_id)s AND channel = %(channel)s AND message_id = %(message_id)s)
        RETURNING s.session_id, s.remember, s.last_turn_seq, s.unsettled > 1 AS busy,
                  s.lease_until > perdure_now() OR s.unsettled > 1 AND {_WOKEN} OR s.not_before > perdure_now()
                  OR {_STRUCK} AS is_woken,
                  {DRAINABLE} AS is_drainable,
                  CASE WHEN s.agent = ANY (%(agents)s::text[]) THEN s.agent ELSE %(default_agent)s END AS agent,
                  CASE WHEN %(agent)s::text IS NULL AND s.agent <> ALL (%(agents)s::text[]) THEN s.agent END AS lacking
    ), turn AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, reply_to, metadata,
                           additions, status, steers, traceparent, accepted_at)
        SELECT %(turn_id)s::uuid, session_id, last_turn_seq, %(user_id)s, coalesce(%(agent)s, agent), %(channel)s,
               %(priority)s::smallint, %(reply_to)s::jsonb, %(metadata)s::jsonb,
               {_ADDITIONS.format(remember="remember")}, 'accepted', busy AND %(on_busy)s = 'steer',
               %(traceparent)s, perdure_now()
        FROM target
    ), input AS (
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, parts, accepted_at)
        SELECT %(user_id)s, %(channel)s, %(message_id)s, %(turn_id)s::uuid, 1, %(text)s, %(parts)s::jsonb, perdure_now()
        FROM target
    )
    SELECT session_id, last_turn_seq AS seq, coalesce(is_woken, false) AS is_woken, is_drainable, lacking
    FROM target
    """,
)

# A message that steered keeps the id of its own turn.
FIND_ACCEPTED = Statement(
    "turns.find_accepted",
    f"""
    SELECT CASE WHEN i.position > 1 THEN coalesce((
               SELECT u.turn_id FROM unrouted AS u
               WHERE u.user_id = i.user_id AND u.routed_to = i.turn_id
                 AND u.message ->> 'channel' = i.channel AND u.message ->> 'message_id' = i.message_id), i.turn_id)
               ELSE i.turn_id END AS turn_id, i.text, i.parts, i.position, t.session_id, t.seq, t.status,
           {_WOKEN} OR s.not_before > perdure_now() OR {_STRUCK} AS is_woken
    FROM inbox AS i JOIN turns AS t USING (turn_id) JOIN sessions AS s USING (session_id)
    WHERE i.user_id = %(user_id)s AND i.channel = %(channel)s AND i.message_id = %(message_id)s
    """,
    writes=False,
)

# Adds a message to the newest turn of a locked session. The turn must not have begun or steer, and must have the
# message's agent, channel, receiver and additions. Its messages together may have at most `max_chars` characters.
# Otherwise returns no row. The members of the message's metadata are added to the turn's; the newer value of a member
# replaces the older.
MERGE = Statement(
    "turns.merge",
    f"""
    WITH newest AS (
        SELECT turn_id, seq, status FROM turns
        WHERE session_id = %(session_id)s AND settled_at IS NULL
        ORDER BY seq DESC LIMIT 1
    ), target AS (
        UPDATE turns AS t
        SET priority = greatest(t.priority, %(priority)s::smallint),
            metadata = CASE WHEN %(metadata)s::jsonb IS NULL THEN t.metadata
                            ELSE coalesce(t.metadata, '{{}}') || %(metadata)s::jsonb END
        FROM newest
        WHERE t.turn_id = newest.turn_id AND t.status = 'accepted' AND NOT t.steers
          AND t.channel = %(channel)s
          AND t.agent = coalesce(%(agent)s::text, (
                SELECT CASE WHEN agent = ANY (%(agents)s::text[]) THEN agent ELSE %(default_agent)s END
                FROM sessions WHERE session_id = %(session_id)s))
          AND t.reply_to IS NOT DISTINCT FROM %(reply_to)s::jsonb
          AND t.additions IS NOT DISTINCT FROM {_ADDITIONS.format(remember=_REMEMBER)}
          AND (SELECT sum(length(text)) FROM inbox WHERE turn_id = newest.turn_id) + length(%(text)s::text)
              <= %(max_chars)s
        RETURNING t.turn_id, t.seq, t.status
    ), ranked AS (
        UPDATE sessions SET priority = greatest(priority, %(priority)s::smallint)
        WHERE session_id = %(session_id)s AND priority < %(priority)s::smallint AND EXISTS (SELECT FROM target)
    ), input AS (
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, parts, accepted_at)
        SELECT %(user_id)s, %(channel)s, %(message_id)s, turn_id,
               (SELECT max(position) + 1 FROM inbox WHERE turn_id = target.turn_id), %(text)s, %(parts)s::jsonb,
               perdure_now()
        FROM target
    )
    SELECT turn_id, seq, status,
           (SELECT {_WOKEN} OR s.not_before > perdure_now() OR {_STRUCK} FROM sessions AS s
            WHERE s.session_id = %(session_id)s) AS is_woken
    FROM target
    """,
)

# Serialises the transactions that accept messages of one user.
QUEUE_UP = Statement(
    "turns.queue_up",
    """
    SELECT pg_advisory_xact_lock(
        hashtextextended(concat_ws(' ', current_schema(), 'perdure rate of', %(user_id)s::text), 0)
    ) IS NULL AS free
    """,
)

# Seconds until both sliding windows (minute and hour) have room. A full window has room when its `most`-th newest
# message leaves it. A timestamp more than 10 s in the future was written while the clock was ahead, and is not counted.
# A timestamp less than 10 s in the future is counted: transactions may commit out of order. A task that an agent gives
# to another (`position` 0) is no message of the user.
FULL_FOR = Statement(
    "turns.full_for",
    """
    SELECT max(extract(epoch FROM oldest.accepted_at - perdure_now()) + rate.within_s)::float AS full_s
    FROM (VALUES (%(minute_s)s::int, %(per_minute)s::int),
                 (%(hour_s)s::int, %(per_hour)s::int)) AS rate (within_s, most),
         LATERAL (
             SELECT accepted_at FROM (
                 (SELECT accepted_at FROM inbox
                  WHERE user_id = %(user_id)s AND position > 0
                    AND accepted_at BETWEEN perdure_now() - make_interval(secs => rate.within_s)
                                        AND perdure_now() + interval '10 seconds'
                  ORDER BY accepted_at DESC LIMIT rate.most)
                 UNION ALL
                 (SELECT requested_at FROM metered_requests
                  WHERE user_id = %(user_id)s
                    AND requested_at BETWEEN perdure_now() - make_interval(secs => rate.within_s)
                                         AND perdure_now() + interval '10 seconds'
                  ORDER BY requested_at DESC LIMIT rate.most)) AS counted
             ORDER BY accepted_at DESC OFFSET greatest(rate.most - 1, 0) LIMIT 1) AS oldest
    WHERE rate.most > 0
    """,
    writes=False,
)

# Counts a request that begins no turn as one of the user's messages.
METER = Statement(
    "turns.meter",
    """
    INSERT INTO metered_requests (request_id, user_id, kind, requested_at)
    VALUES (%(request_id)s::uuid, %(user_id)s, %(kind)s, perdure_now())
    """,
)

# Records what the answer of a side request has cost.
METER_USAGE = Statement(
    "turns.meter_usage",
    """
    UPDATE metered_requests SET model = %(model)s, usage = %(usage)s::jsonb WHERE request_id = %(request_id)s::uuid
    """,
)

# Raises the fence of a locked session, so that the worker that runs it can write nothing more. The caller settles the
# session's turns.
SEIZE = Statement(
    "turns.seize",
    f"""
    UPDATE sessions AS s
    SET {RAISED}, lease_owner = NULL, lease_until = NULL, strikes = 0, claims = 0, not_before = NULL, queued_at = NULL
    WHERE session_id = %(session_id)s
    RETURNING token, nonce
    """,
)

# A session's turn that has begun and is not settled, if any. Turns run one at a time in the order of `seq`, so only the
# oldest unsettled turn can have begun.
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

# In a locked session, the queued turns whose reply has a receiver.
OWING = Statement(
    "turns.owing",
    """
    SELECT turn_id FROM turns
    WHERE session_id = %(session_id)s AND settled_at IS NULL AND status = 'accepted' AND reply_to IS NOT NULL
    ORDER BY seq
    """,
    writes=False,
)

# Settles all queued turns of a locked session as cancelled, and writes their deliveries. `delivery_ids` has an id for
# each turn in `turn_ids`.
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
        RETURNING t.turn_id, t.user_id, s.scope, t.reply_to
    ), counted AS (
        SELECT count(*) AS turns FROM cancelled
    ), released AS (
        UPDATE sessions AS s
        SET unsettled = s.unsettled - counted.turns, turn_count = s.turn_count + counted.turns,
            last_activity_at = perdure_now(), unequipped_since = NULL,
            state = CASE WHEN s.unsettled = counted.turns
                         THEN {sql(Trigger.TURN_STOPPED, column="s.state")} ELSE s.state END
        FROM counted WHERE s.session_id = %(session_id)s AND counted.turns > 0
    )
    INSERT INTO deliveries (delivery_id, turn_id, user_id, scope, target, status, due_at, created_at)
    SELECT owed.delivery_id, owed.turn_id, user_id, scope, reply_to, 'pending', perdure_now(), perdure_now()
    FROM unnest(%(delivery_ids)s::uuid[], %(turn_ids)s::uuid[]) AS owed (delivery_id, turn_id)
    JOIN cancelled USING (turn_id)
    RETURNING delivery_id
    """,
)
