"""The SQL statements for users' schedules."""

from __future__ import annotations

from perdure.database.engine import Statement

# Serialises the transactions that add schedules of one user, so that the limit of schedules per user is exact.
QUEUE_UP = Statement(
    "reminders.queue_up",
    """
    SELECT pg_advisory_xact_lock(
        hashtextextended(concat_ws(' ', current_schema(), 'perdure schedules of', %(user_id)s::text), 0)
    ) IS NULL AS free
    """,
)

COUNT = Statement("reminders.count", "SELECT count(*) AS n FROM reminders WHERE user_id = %(user_id)s", writes=False)

# Blocks the user's erasure until the commit. Returns no row if the user does not exist.
LOCK_USER = Statement("reminders.lock_user", "SELECT user_id FROM users WHERE user_id = %(user_id)s FOR KEY SHARE")

# The channel, agent, conversation and reply receiver of the turn `turn_id`, and whether it may be remembered; of the
# conversation's turn, if the turn answers a call of another agent. A new schedule copies these values. `decided_at` is
# when the call `effect_id` was approved, if it needed that.
PLACE = Statement(
    "reminders.place",
    """
    WITH RECURSIVE above (turn_id) AS (
        SELECT %(turn_id)s::uuid
        UNION ALL
        SELECT e.turn_id FROM above JOIN tool_effects AS e ON e.effect_id = above.turn_id AND e.waits_for = 'agent'
    )
    SELECT t.channel, t.agent, t.reply_to, CASE WHEN left(s.scope, 1) = '/' THEN substr(s.scope, 2) END AS conversation,
           coalesce(t.additions -> 'remember' <> 'false', true) AS remember,
           (SELECT decided_at FROM tool_effects WHERE effect_id = %(effect_id)s) AS decided_at
    FROM above JOIN turns AS t USING (turn_id) JOIN sessions AS s USING (session_id)
    WHERE s.depth = 0 AND t.user_id = %(user_id)s
    """,
    writes=False,
)

ADD = Statement(
    "reminders.add",
    """
    INSERT INTO reminders (schedule_id, user_id, text, cron, timezone, channel, conversation, agent, reply_to, remember,
                           created_at, once, next_due)
    VALUES (%(schedule_id)s, %(user_id)s, %(text)s, %(cron)s::text, %(timezone)s, %(channel)s, %(conversation)s,
            %(agent)s, %(reply_to)s::jsonb, %(remember)s, perdure_now(),
            CASE WHEN %(cron)s::text IS NULL THEN %(next_due)s::timestamptz END, %(next_due)s::timestamptz)
    ON CONFLICT (schedule_id) DO NOTHING
    """,
)

READ = Statement("reminders.read", "SELECT * FROM reminders WHERE schedule_id = %(schedule_id)s::uuid", writes=False)

# Whether a message was accepted.
IS_ACCEPTED = Statement(
    "reminders.is_accepted",
    """
    SELECT EXISTS (
        SELECT FROM inbox WHERE user_id = %(user_id)s AND channel = %(channel)s AND message_id = %(message_id)s
    ) AS is_accepted
    """,
    writes=False,
)

LIST_OF_USER = Statement(
    "reminders.list_of_user",
    """
    SELECT * FROM reminders WHERE user_id = %(user_id)s ORDER BY next_due NULLS LAST, schedule_id LIMIT %(limit)s
    """,
    writes=False,
)

LIST = Statement(
    "reminders.list", "SELECT * FROM reminders ORDER BY next_due NULLS LAST, schedule_id LIMIT %(limit)s", writes=False
)

# A paused schedule has no `next_due`.
CHANGE = Statement(
    "reminders.change",
    """
    UPDATE reminders SET paused = %(paused)s, next_due = %(next_due)s::timestamptz, taken_until = NULL
    WHERE schedule_id = %(schedule_id)s RETURNING *
    """,
)

REMOVE = Statement(
    "reminders.remove",
    "DELETE FROM reminders WHERE schedule_id = %(schedule_id)s::uuid AND user_id = %(user_id)s RETURNING schedule_id",
)

# --- firing ------------------------------------------------------------------------------

# Schedules that fired while the server's clock was ahead: their newest slot is in the future, and their next one is
# later. They count as due. Only the schedules with the latest times are read, so that an idle round reads few rows.
_AHEAD = """
    SELECT schedule_id FROM (
        SELECT schedule_id, last_slot FROM reminders
        WHERE next_due > perdure_now() ORDER BY next_due DESC LIMIT 100) AS latest
    WHERE last_slot > perdure_now() + interval '1 minute'
""".strip()

# Whether any schedule is due. If no schedule is due, the sweeper's round writes nothing.
ANY_DUE = Statement(
    "reminders.any_due",
    f"""
    SELECT EXISTS (SELECT FROM reminders WHERE next_due <= perdure_now()) OR EXISTS ({_AHEAD}) AS due
    """,  # noqa: S608 (constants)
    writes=False,
)

_FREE = """
    (taken_until IS NULL OR taken_until <= perdure_now()
     OR taken_until > perdure_now() + make_interval(secs => greatest(%(lease_s)s::float, 3600) + 60))
""".strip()

# The live session whose turn made a schedule, if no message is routed to it: a fork. The schedule has the id of the
# turn's call, or of a call of an agent that works for the turn.
_APART = """
    (WITH RECURSIVE above (turn_id) AS (
         SELECT turn_id FROM tool_effects WHERE effect_id = reminders.schedule_id
         UNION ALL
         SELECT e.turn_id FROM above JOIN tool_effects AS e ON e.effect_id = above.turn_id AND e.waits_for = 'agent'
     )
     SELECT s.session_id FROM above JOIN turns USING (turn_id) JOIN sessions AS s USING (session_id)
     WHERE s.depth = 0 AND NOT s.routable AND s.end_requested_at IS NULL)
""".strip()

# Leases due schedules to the calling worker. If the worker dies, another worker takes the schedules after the lease
# expires. `POSTPONE` sets a lease of at most an hour. A lease that is longer than an hour and longer than `lease_s` was
# written while the server's clock was ahead, and counts as expired. `earlier` is the status of the turn that the
# schedule's last message has begun, until the turn is settled.
TAKE_DUE = Statement(
    "reminders.take_due",
    f"""
    WITH due AS (
        SELECT schedule_id FROM reminders
        WHERE next_due <= perdure_now() AND {_FREE}
        ORDER BY next_due LIMIT %(most)s FOR NO KEY UPDATE SKIP LOCKED
    ), ahead AS (
        SELECT schedule_id FROM reminders
        WHERE schedule_id = ANY (ARRAY({_AHEAD})) AND {_FREE} FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE reminders SET taken_until = perdure_now() + make_interval(secs => %(lease_s)s)
    WHERE schedule_id = ANY (ARRAY(SELECT schedule_id FROM due UNION ALL SELECT schedule_id FROM ahead))
    RETURNING *, perdure_now() AS now, {_APART} AS session_id,
              (SELECT status FROM turns WHERE turn_id = last_turn_id AND settled_at IS NULL) AS earlier
    """,  # noqa: S608 (constants)
)

# Sets a schedule's next due time. `due` is the due time for which the worker leased the schedule. If the schedule was
# paused or removed since the lease began, nothing changes.
ADVANCE = Statement(
    "reminders.advance",
    """
    UPDATE reminders
    SET next_due = %(next_due)s::timestamptz, taken_until = NULL, error = %(error)s,
        last_slot = coalesce(%(slot)s::timestamptz, last_slot), last_turn_id = coalesce(%(turn_id)s::uuid, last_turn_id)
    WHERE schedule_id = %(schedule_id)s AND next_due = %(due)s::timestamptz
    RETURNING schedule_id
    """,
)

# Postpones a schedule that could not be fired. If the schedule's row is locked, nothing changes, and a worker takes the
# schedule again when its lease expires.
POSTPONE = Statement(
    "reminders.postpone",
    """
    WITH unlocked AS (
        SELECT schedule_id FROM reminders WHERE schedule_id = %(schedule_id)s AND next_due = %(due)s::timestamptz
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE reminders AS r
    SET error = coalesce(%(error)s, r.error), taken_until = perdure_now() + make_interval(secs => %(again_s)s)
    FROM unlocked WHERE r.schedule_id = unlocked.schedule_id
    """,
)

FINISH = Statement(
    "reminders.finish",
    """
    DELETE FROM reminders WHERE schedule_id = %(schedule_id)s AND next_due = %(due)s::timestamptz
    RETURNING schedule_id
    """,
)
