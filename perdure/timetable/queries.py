"""The SQL statements for the schedule's entries and slots, in the order in which a slot passes through them.

`schedule_entries` has one row for each entry. The row holds the time at which the entry was registered, and the lease
on the slot that a worker has claimed. Since an entry has only one lease, two slots of an entry never run concurrently.
`schedule_slots` has the outcome of each slot. A statement that locks rows of both tables locks the entry before the
slot.
"""

from __future__ import annotations

from perdure.database.engine import Statement

# Inserts new entries, and returns the database's time. After the clock was set back, stored times may be too far in the
# future. Therefore the statement also reduces such times: an entry's `since`, the end of the entry's lease, and the
# retry times of the entry's slots. If the worker that holds a shortened lease is alive, it renews the lease in time.
REGISTER = Statement(
    "slots.register",
    """
    WITH added AS (
        INSERT INTO schedule_entries (entry, since)
        SELECT name, perdure_now() FROM unnest(%(entries)s::text[]) AS name
        WHERE NOT EXISTS (SELECT FROM schedule_entries WHERE entry = name)
        ON CONFLICT (entry) DO NOTHING
    ), corrected AS (
        UPDATE schedule_entries
        SET since = least(since, perdure_now()),
            lease_until = CASE WHEN lease_until IS NOT NULL
                THEN least(lease_until, perdure_now() + make_interval(secs => %(lease_s)s)) END
        WHERE entry = ANY (%(entries)s::text[])
          AND (since > perdure_now() OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s))
    ), retries AS (
        UPDATE schedule_slots
        SET retry_at = perdure_now() + make_interval(secs => %(longest_retry_s)s)
        WHERE entry = ANY (%(entries)s::text[]) AND done_at IS NULL
          AND retry_at > perdure_now() + make_interval(secs => %(longest_retry_s)s)
    )
    SELECT perdure_now() AS now
    """,
)

# Claims a slot that is new, whose lease expired, or that failed and is due again. Of concurrent callers, only one gets
# a row. The statement first locks the entry's row and reads the latest version of this row. ON CONFLICT then reads the
# latest version of the slot's row, not the version in the statement's snapshot.
CLAIM = Statement(
    "slots.claim",
    """
    WITH free AS (
        SELECT entry FROM schedule_entries
        WHERE entry = %(entry)s AND since <= %(slot)s::timestamptz
          AND (lease_until IS NULL OR lease_until <= perdure_now())
        FOR NO KEY UPDATE
    ), claimed AS (
        INSERT INTO schedule_slots AS s (entry, slot, taken_at)
        SELECT entry, %(slot)s::timestamptz, perdure_now() FROM free
        ON CONFLICT (entry, slot) DO UPDATE
        SET taken_at = excluded.taken_at,
            attempts = s.attempts + 1,
            retry_at = perdure_now() + make_interval(
                secs => least(%(first_retry_s)s * 2 ^ least(s.attempts - 1, 20), %(longest_retry_s)s))
        WHERE s.done_at IS NULL AND (s.retry_at IS NULL OR s.retry_at <= perdure_now())
        RETURNING s.entry, s.attempts
    )
    UPDATE schedule_entries AS e
    SET token = e.token + 1, lease_until = perdure_now() + make_interval(secs => %(lease_s)s), wakes = 0
    FROM claimed WHERE e.entry = claimed.entry
    RETURNING e.token, claimed.attempts
    """,
)

# Checks only the token: a worker may renew an expired lease, unless another worker has claimed the entry since.
RENEW = Statement(
    "slots.renew",
    """
    UPDATE schedule_entries SET lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
    WHERE entry = %(entry)s AND token = %(token)s
    RETURNING entry
    """,
)

# Marks a slot done. Also deletes the entry's slots older than `kept_days` days, except the newest `kept_slots` slots.
SETTLE = Statement(
    "slots.settle",
    """
    WITH held AS (
        UPDATE schedule_entries SET lease_until = NULL
        WHERE entry = %(entry)s AND token = %(token)s
        RETURNING entry
    ), done AS (
        UPDATE schedule_slots AS s SET done_at = perdure_now(), error = NULL, retry_at = NULL
        FROM held WHERE s.entry = held.entry AND s.slot = %(slot)s::timestamptz
    ), deleted AS (
        DELETE FROM schedule_slots AS s USING held
        WHERE s.entry = held.entry AND s.slot <> %(slot)s::timestamptz
          AND s.slot < perdure_now() - make_interval(days => %(kept_days)s)
          AND s.slot <= (SELECT slot FROM schedule_slots WHERE entry = %(entry)s
                        ORDER BY slot DESC OFFSET %(kept_slots)s LIMIT 1)
    )
    SELECT entry FROM held
    """,
)

# Records a failure. The slot is due again after a delay, which doubles with each attempt. If the entry's next slot
# becomes due during the delay, the failed slot is not attempted again.
FAIL = Statement(
    "slots.fail",
    """
    WITH held AS (
        UPDATE schedule_entries SET lease_until = NULL
        WHERE entry = %(entry)s AND token = %(token)s
        RETURNING entry
    )
    UPDATE schedule_slots AS s
    SET error = %(error)s,
        retry_at = perdure_now() + make_interval(
            secs => least(%(first_retry_s)s * 2 ^ least(s.attempts - 1, 20), %(longest_retry_s)s))
    FROM held WHERE s.entry = held.entry AND s.slot = %(slot)s::timestamptz
    RETURNING s.retry_at
    """,
)

# --- sweep -------------------------------------------------------------------------------

# Returns a row to only one worker, which then executes the round. A due time that is more than one interval ahead was
# written before the clock was set back, and counts as reached. A difference of up to a second is ignored, because
# concurrent rounds normally cause it. A worker attempts once per interval, so it may take a round a little early.
TAKE_ROUND = Statement(
    "slots.take_round",
    """
    INSERT INTO sweeps AS s (name, due_at)
    VALUES ('schedules', perdure_now() + make_interval(secs => %(every_s)s))
    ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at
    WHERE s.due_at <= perdure_now() + make_interval(secs => least(%(every_s)s::float / 5, 1))
       OR s.due_at > excluded.due_at + interval '1 second'
    RETURNING s.name
    """,
)

# The entries whose newest slot is due and not claimed. A slot that was fired but not claimed is fired again after a
# delay. The delay doubles each time, so that a queue without workers fills slowly.
DUE = Statement(
    "slots.due",
    """
    SELECT newest.entry
    FROM unnest(%(entries)s::text[], %(slots)s::timestamptz[]) AS newest (entry, slot)
    JOIN schedule_entries AS e USING (entry)
    LEFT JOIN schedule_slots AS s ON s.entry = newest.entry AND s.slot = newest.slot
    WHERE e.since <= newest.slot
      AND (e.lease_until IS NULL OR e.lease_until <= perdure_now())
      AND s.done_at IS NULL
      AND (s.retry_at IS NULL OR s.retry_at <= perdure_now())
      AND (e.woken_at IS NULL OR e.woken_at < newest.slot OR e.woken_at > perdure_now()
           OR e.woken_at <= perdure_now() - make_interval(secs => %(every_s)s * 2 ^ least(e.wakes, 6)))
    ORDER BY newest.slot, newest.entry
    """,
    writes=False,
)

FIRED = Statement(
    "slots.fired",
    """
    UPDATE schedule_entries AS e
    SET woken_at = perdure_now(), wakes = CASE WHEN e.woken_at >= fired.slot THEN e.wakes + 1 ELSE 1 END
    FROM unnest(%(entries)s::text[], %(slots)s::timestamptz[]) AS fired (entry, slot)
    WHERE e.entry = fired.entry
    """,
)

# --- reading -----------------------------------------------------------------------------

# The status of each entry: when the entry was registered, its newest slot in the ledger, and its newest slot that is
# done.
STANDING = Statement(
    "slots.standing",
    """
    SELECT name AS entry, perdure_now() AS now, e.since, e.lease_until > perdure_now() AS running,
           newest.slot, newest.attempts, newest.done_at IS NOT NULL AS done, newest.error,
           last.slot AS done_slot, last.done_at
    FROM unnest(%(entries)s::text[]) AS name
    LEFT JOIN schedule_entries AS e ON e.entry = name
    LEFT JOIN LATERAL (SELECT * FROM schedule_slots AS s WHERE s.entry = name AND s.slot <= perdure_now()
                       ORDER BY s.slot DESC LIMIT 1) AS newest ON true
    LEFT JOIN LATERAL (SELECT * FROM schedule_slots AS s WHERE s.entry = name AND s.done_at IS NOT NULL
                       ORDER BY s.slot DESC LIMIT 1) AS last ON true
    """,
    writes=False,
)
