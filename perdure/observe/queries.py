"""The statements that read the condition of an installation, and those by which a process reports that it runs.

Each reading stays cheap at any size. It counts rows along a partial index, and stops at `most` of them: a number that
equals `most` means "or more". The age of the oldest turn that is due is an estimate: of each range of
`sessions_due_idx`, the first rows are read, which are those that were woken first.
"""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.pausing import PAUSED

BOUND = Statement("observe.bound", "SELECT set_config('statement_timeout', %(milliseconds)s::text, true)", writes=False)

_UNLEASED = "(lease_until IS NULL OR lease_until <= perdure_now())"

# A session is due if its turn may run now and no worker holds the session.
_DUE = f"unsettled > 0 AND not_before IS NULL AND {_UNLEASED}"

# The sessions that are due, by priority, and the age of the oldest turn among those that were woken first.
DUE = Statement(
    "observe.due",
    f"""
    SELECT rank AS priority,
           (SELECT count(*) FROM (
                SELECT FROM sessions WHERE {_DUE} AND priority = rank
                ORDER BY least(wakes, 6), coalesce(woken_at, '-infinity'::timestamptz)
                LIMIT (SELECT %(most)s::bigint)) AS counted) AS number,
           (SELECT extract(epoch FROM perdure_now() - min(oldest.accepted_at))::float
            FROM generate_series(0, 6) AS level, LATERAL (
                SELECT session_id FROM sessions WHERE {_DUE} AND priority = rank AND least(wakes, 6) = level
                ORDER BY coalesce(woken_at, '-infinity'::timestamptz) LIMIT (SELECT %(first)s::bigint)) AS woken,
            LATERAL (SELECT accepted_at FROM turns WHERE turns.session_id = woken.session_id AND settled_at IS NULL
                     ORDER BY seq LIMIT 1) AS oldest) AS oldest_s
    FROM generate_series(0, 9) AS rank
    """,
    writes=False,
)


def _amount(what: str, table: str, since: str, where: str, order: str = "") -> str:
    return f"""
    SELECT '{what}' AS what, count(*) AS number,
           extract(epoch FROM perdure_now() - min(since))::float AS oldest_s
    FROM (SELECT {since} AS since FROM {table} WHERE {where} {order} LIMIT (SELECT %(most)s::bigint)) AS counted
    """


# Numbers of rows, each with the age of its oldest row. What fails is counted among the first `most` rows that wait.
AMOUNTS = Statement(
    "observe.amounts",
    "UNION ALL".join(
        (
            _amount("queued", "sessions", "queued_at", "unsettled > 0 AND queued_at IS NOT NULL",
                    "ORDER BY user_id, priority DESC, queued_at"),
            _amount("approvals", "tool_effects", "intended_at", "status = 'asked'", "ORDER BY effect_id"),
            _amount(
                "deliveries_pending", "deliveries", "created_at", "status = 'pending'",
                "ORDER BY greatest(due_at, wake_at)",
            ),
            _amount(
                "deliveries_failing",
                "(SELECT created_at, attempts FROM deliveries WHERE status = 'pending'"
                " ORDER BY greatest(due_at, wake_at) LIMIT (SELECT %(most)s::bigint)) AS pending",
                "created_at", "attempts > 0",
            ),
            _amount("deliveries_failed", "deliveries", "created_at", "status = 'failed'", "ORDER BY created_at DESC"),
            _amount(
                "deliveries_failed_lately", "deliveries", "due_at",
                "status = 'failed' AND due_at > perdure_now() - interval '1 hour'", "ORDER BY due_at DESC",
            ),
            _amount("unrouted", "unrouted", "accepted_at", "settled_at IS NULL", "ORDER BY due_at, position"),
            _amount(
                "endings", "sessions", "end_requested_at", "end_requested_at IS NOT NULL AND ended_at IS NULL",
                "ORDER BY end_requested_at",
            ),
            _amount(
                "consolidations_waiting", "sessions", "ended_at",
                "ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL",
                "ORDER BY ended_at",
            ),
            _amount(
                "consolidations_failing",
                "(SELECT ended_at, consolidation_error, consolidation_due_at FROM sessions WHERE ended_at IS NOT NULL"
                " AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL"
                " ORDER BY ended_at LIMIT (SELECT %(most)s::bigint)) AS waiting",
                "ended_at", "consolidation_error IS NOT NULL AND consolidation_due_at IS NOT NULL",
            ),
            _amount(
                "consolidations_given_up", "sessions", "consolidation_given_up_at",
                "consolidation_given_up_at IS NOT NULL", "ORDER BY consolidation_given_up_at, session_id",
            ),
            _amount(
                "reminders_late", "reminders", "next_due", "next_due <= perdure_now() - interval '1 minute'",
                "ORDER BY next_due",
            ),
        )
    ),
    writes=False,
)  # fmt: skip

UNSETTLED = Statement(
    "observe.unsettled",
    """
    SELECT agent, status, count(*) AS number
    FROM (SELECT agent, status FROM turns WHERE settled_at IS NULL
          ORDER BY session_id, seq LIMIT (SELECT %(most)s::bigint)) AS counted
    GROUP BY agent, status
    """,
    writes=False,
)

# The turns that were accepted within the last hour and failed, by agent and error code. `since` is the least id of that
# time; turns that were imported, or copied by a fork, have later ids. What a fork copied counts in its source.
FAILED = Statement(
    "observe.failed",
    """
    SELECT agent, error_code, count(*) AS number
    FROM (SELECT session_id, agent, error_code, status, accepted_at FROM turns
          WHERE error_code IS NOT NULL AND turn_id >= %(since)s::uuid
          ORDER BY turn_id DESC LIMIT (SELECT %(most)s::bigint)) AS counted
    WHERE status = 'failed' AND accepted_at > perdure_now() - interval '1 hour'
      AND EXISTS (SELECT FROM sessions AS s WHERE s.session_id = counted.session_id
                    AND (s.forked_from IS NULL OR counted.accepted_at >= s.created_at))
    GROUP BY agent, error_code
    """,
    writes=False,
)

# The sessions whose turn waits for a model, by model.
PARKED = Statement(
    "observe.parked",
    """
    SELECT model, count(*) AS number
    FROM (SELECT coalesce(parked_for, '') AS model FROM sessions
          WHERE unsettled > 0 AND not_before IS NOT NULL AND paced
          ORDER BY coalesce(parked_for, ''), least(wakes, 6), not_before LIMIT (SELECT %(most)s::bigint)) AS counted
    GROUP BY model
    """,
    writes=False,
)

# By how many seconds the next round of each sweep is late.
SWEEPS = Statement(
    "observe.sweeps",
    """
    SELECT name, greatest(extract(epoch FROM perdure_now() - due_at), 0)::float AS late_s
    FROM sweeps WHERE name = ANY (%(names)s::text[])
    """,
    writes=False,
)

INTAKE = Statement(
    "observe.intake", "SELECT EXISTS (SELECT FROM intake WHERE closed_at IS NOT NULL) AS closed", writes=False
)

# Fails if the server refuses writes: it is a standby, or was demoted. Changes no row, takes no number of a transaction
# and writes no WAL. Reading `pg_is_in_recovery()` would leave the pool's connections to a server that has become a
# standby; the engine replaces them if they are refused a write.
WRITABLE = Statement("observe.writable", "UPDATE sweeps SET due_at = due_at WHERE false", writes=False)

# A transaction keeps PostgreSQL from removing dead rows only if it has a snapshot or a number, which one that is idle
# over an advisory lock has not (`Database.lock`). A role sees the transactions of its own sessions, and those of others
# with the rights of pg_read_all_stats. Connections to all databases count, since max_connections is the server's.
SERVER = Statement(
    "observe.server",
    """
    SELECT pg_database_size(current_database()) AS size_bytes,
           (SELECT coalesce(extract(epoch FROM clock_timestamp() - min(xact_start)), 0)::float
            FROM pg_stat_activity
            WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
              AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)) AS oldest_transaction_s,
           (SELECT sum(numbackends)::int FROM pg_stat_database) AS connections,
           current_setting('max_connections')::int AS max_connections
    """,
    writes=False,
)

SEES_TRANSACTIONS = Statement(
    "observe.sees_transactions", "SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS sees", writes=False
)

PROCESSES = Statement(
    "observe.processes",
    """
    SELECT kind, name, owner, release, queues, started_at, stopped_at IS NOT NULL AS stopped,
           greatest(extract(epoch FROM perdure_now() - seen_at), 0)::float AS seen_s, skew_s, quiet
    FROM processes ORDER BY kind, name, started_at
    """,
    writes=False,
)

# Reports that a process runs. Forgets processes that reported nothing for a day.
REPORT = Statement(
    "observe.report",
    """
    WITH forgotten AS (
        DELETE FROM processes WHERE seen_at < perdure_now() - interval '1 day' AND process_id <> %(process_id)s::uuid
    )
    INSERT INTO processes AS p (process_id, kind, name, owner, release, queues, started_at, seen_at, skew_s, quiet)
    VALUES (%(process_id)s::uuid, %(kind)s, %(name)s, %(owner)s, %(release)s, %(queues)s::text[], perdure_now(),
            perdure_now(), extract(epoch FROM %(now)s::timestamptz - perdure_now())::float, %(quiet)s::boolean)
    ON CONFLICT (process_id) DO UPDATE
    SET seen_at = excluded.seen_at, skew_s = excluded.skew_s, quiet = excluded.quiet, queues = excluded.queues
    """,
)

STOPPED = Statement(
    "observe.stopped", "UPDATE processes SET stopped_at = perdure_now() WHERE process_id = %(process_id)s::uuid"
)

# Sessions whose oldest unsettled turn was accepted more than `stuck_s` seconds ago, with what it takes to say why. Of
# each range of the two indexes, the first rows are candidates.
STUCK = Statement(
    "observe.stuck",
    f"""
    WITH candidates AS (
        SELECT found.session_id FROM generate_series(0, 9) AS rank, generate_series(0, 6) AS level, LATERAL (
            SELECT session_id FROM sessions
            WHERE unsettled > 0 AND not_before IS NULL AND priority = rank AND least(wakes, 6) = level
            ORDER BY coalesce(woken_at, '-infinity'::timestamptz) LIMIT (SELECT %(most)s::bigint)) AS found
        UNION
        SELECT found.session_id FROM (VALUES (false), (true)) AS kinds (kind), generate_series(0, 6) AS level, LATERAL (
            SELECT session_id FROM sessions
            WHERE unsettled > 0 AND not_before IS NOT NULL AND paced = kind AND least(wakes, 6) = level
            ORDER BY not_before LIMIT (SELECT %(most)s::bigint)) AS found
    )
    SELECT s.session_id, s.user_id, s.state, s.unsettled, t.turn_id, t.agent, t.status,
           s.priority, s.wakes, s.strikes, s.lease_owner, s.parked_for,
           extract(epoch FROM perdure_now() - t.accepted_at)::float AS age_s,
           s.lease_until, NOT {_UNLEASED} AS held, s.not_before, s.not_before > perdure_now() AS postponed,
           s.queued_at IS NOT NULL AS queued, {PAUSED.format(user_id="s.user_id", agent="t.agent")} AS paused,
           s.unequipped_since, s.woken_at,
           (SELECT waits_for FROM tool_effects AS e WHERE e.turn_id = t.turn_id AND e.status = 'intended'
            AND e.waits_for IS NOT NULL LIMIT 1) AS waits_for
    FROM candidates JOIN sessions AS s USING (session_id), LATERAL (
        SELECT turn_id, agent, status, accepted_at FROM turns
        WHERE turns.session_id = s.session_id AND settled_at IS NULL ORDER BY seq LIMIT 1) AS t
    WHERE t.accepted_at <= perdure_now() - make_interval(secs => %(stuck_s)s)
    ORDER BY t.accepted_at LIMIT (SELECT %(most)s::bigint)
    """,
    writes=False,
)
