"""Retention: deletes rows that are no longer read, after the days of `PERDURE_RETENTION__*`.

These rows are deleted:

- delivered and failed deliveries
- snapshots that were set aside as unusable, and snapshots of ended sessions
- messages of the inbox, if their text is in a transcript
- applications' messages that were refused, or that were merged into an existing turn
- records of answered requests, which are kept to recognise a request that is sent again
- records of requests that begin no turn (side requests and forks)
- executions that are too old to affect their case's success rate
- dry runs of the CaseBank
- records of operators' actions
- expired codes for linking channels
- counts of attempts to link a channel
- what turns and days cost, which is kept for budgets
- tool calls of ended sessions

Where it is set, also vectors of messages, ended sessions with their transcripts, and conversations that have no session
left, whose titles quote their users. A session stays as long as a memory, an open session that follows it or was forked
from it, or a pending delivery needs its messages. This module never deletes memories or cases.

Each statement reads and deletes a bounded number of rows through an index. If a table has no index that finds the old
rows, `retain` scans the whole table once per call, page by page through the index of the table's key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from perdure.casebank.reflection import EXECUTIONS
from perdure.database.engine import Database, Statement
from perdure.errors import loggable
from perdure.settings import RetentionSettings

log = logging.getLogger(__name__)

_BATCH = 1_000

_CUTOFF = "perdure_now() - make_interval(days => %(days)s)"

# The smallest UUIDv7 of the cutoff's millisecond. Every id that was created earlier is smaller.
_CUTOFF_ID = f"""
    (lpad(to_hex((extract(epoch FROM {_CUTOFF}) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
""".strip()

_FIRST_ID = "00000000-0000-0000-0000-000000000000"

# In each statement, a query with a LIMIT finds the keys, and DELETE receives the keys as an array. A DELETE that joined
# the query would read the whole table, because the generic plan of a prepared statement does not know the limit. Each
# statement returns one row: the number of deleted rows, and the value of `after` for the next batch (NULL if this batch
# was the last).
_DELETED = "SELECT count(*) AS deleted, CASE WHEN count(*) = %(most)s THEN %(after)s::text END AS after FROM gone"


def _oldest(name: str, table: str, key: str, old: str, order: str) -> Statement:
    """Deletes the rows of `table` that are `old`, those with the least `order` first. `key` finds a row.

    A row that has been found by its place (`ctid`) or its user may be another row by the time that DELETE locks it, so
    it is checked again.
    """
    still = f"AND {old}" if key in {"ctid", "user_id"} else ""
    return Statement(
        f"retention.{name}",
        f"""
        WITH old AS (
            SELECT {key} FROM {table} WHERE {old} ORDER BY {order} LIMIT %(most)s
        ), gone AS (
            DELETE FROM {table} WHERE {key} = ANY (ARRAY(SELECT {key} FROM old)) {still} RETURNING 1
        )
        {_DELETED}
        """,  # noqa: S608 (constants)
    )


DELIVERIES = _oldest(
    "deliveries", "deliveries", "delivery_id", f"status <> 'pending' AND created_at < {_CUTOFF}", "created_at"
)
SET_ASIDE = _oldest("set_aside", "snapshots", "ctid", f"set_aside AND saved_at < {_CUTOFF}", "saved_at")
DRY_RUNS = _oldest(
    "dry_runs", "case_runs", "run_id", f"started_at < {_CUTOFF} AND dry_run AND finished_at IS NOT NULL", "started_at"
)
AUDIT = _oldest("audit", "audit", "audit_id", f"audit_id < {_CUTOFF_ID}", "audit_id")
LINK_CODES = _oldest("link_codes", "link_codes", "user_id", f"expires_at < {_CUTOFF}", "expires_at")
LINK_ATTEMPTS = _oldest("link_attempts", "link_attempts", "ctid", f"since < {_CUTOFF}", "since")
ANSWERED_REQUESTS = _oldest("answered_requests", "answered_requests", "ctid", f"answered_at < {_CUTOFF}", "answered_at")
METERED_REQUESTS = _oldest(
    "metered_requests", "metered_requests", "request_id", f"requested_at < {_CUTOFF}", "requested_at"
)
UNROUTED = _oldest("unrouted", "unrouted", "turn_id", f"settled_at < {_CUTOFF}", "settled_at")
DAY_SPENDINGS = _oldest("day_spendings", "day_spendings", "ctid", f"day < ({_CUTOFF})::date", "day")

# The end of a session deletes the session's snapshots. This statement deletes the snapshots that were written after the
# end. The snapshots of a session that has not ended stay, because forks need them. Each page begins after the last
# session of the page before, so the scan never reads more than one page of a session's snapshots.
OF_ENDED_SESSIONS = Statement(
    "retention.of_ended_sessions",
    f"""
    WITH page AS (
        SELECT session_id FROM snapshots
        WHERE session_id > %(after)s::uuid AND session_id < {_CUTOFF_ID}
        ORDER BY session_id LIMIT %(most)s
    ), ended AS (
        SELECT session_id FROM sessions
        WHERE session_id = ANY (ARRAY(SELECT DISTINCT session_id FROM page)) AND ended_at < {_CUTOFF}
    ), gone AS (
        DELETE FROM snapshots WHERE NOT set_aside AND session_id = ANY (ARRAY(SELECT session_id FROM ended)) RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           CASE WHEN count(*) = %(most)s THEN max(session_id::text) END AS after FROM page
    """,  # noqa: S608 (constants)
)

# An inbox row is read in three ways: by `message_id` when the message is sent again, by time for the hourly rate limit,
# and by turn until the turn's first commit copies the text into the transcript. The text of a turn that was cancelled
# before it began exists only in the inbox, so the turn's inbox rows stay.
INBOX = Statement(
    "retention.inbox",
    f"""
    WITH page AS (
        SELECT turn_id FROM inbox
        WHERE turn_id > %(after)s::uuid AND turn_id < {_CUTOFF_ID}
        ORDER BY turn_id LIMIT %(most)s
    ), old AS (
        SELECT turn_id FROM turns
        WHERE turn_id = ANY (ARRAY(SELECT DISTINCT turn_id FROM page))
          AND settled_at < {_CUTOFF} AND first_seq IS NOT NULL
    ), gone AS (
        DELETE FROM inbox WHERE turn_id = ANY (ARRAY(SELECT turn_id FROM old)) RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           CASE WHEN count(*) = %(most)s THEN max(turn_id::text) END AS after FROM page
    """,  # noqa: S608 (constants)
)

# Reflection rates a case by its newest `executions` executions, ordered by `executed_at` and `turn_id`. This statement
# deletes the executions that are older in this order. An execution that is not yet counted in the case's `usage_count`
# stays.
USES = Statement(
    "retention.uses",
    f"""
    WITH page AS (
        SELECT case_id FROM cases WHERE case_id > %(after)s ORDER BY case_id LIMIT %(most)s
    ), old AS (
        SELECT behind.ctid
        FROM page
        CROSS JOIN LATERAL (
            SELECT executed_at, turn_id FROM case_executions WHERE case_id = page.case_id
            ORDER BY executed_at DESC, turn_id DESC OFFSET %(executions)s - 1 LIMIT 1
        ) AS kept
        CROSS JOIN LATERAL (
            SELECT e.ctid FROM case_executions AS e
            WHERE e.case_id = page.case_id AND (e.executed_at, e.turn_id) < (kept.executed_at, kept.turn_id)
              AND e.executed_at < {_CUTOFF} AND e.counted
            ORDER BY e.executed_at, e.turn_id LIMIT %(most)s
        ) AS behind
        LIMIT %(most)s
    ), gone AS (
        DELETE FROM case_executions WHERE ctid = ANY (ARRAY(SELECT ctid FROM old)) RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           CASE WHEN (SELECT count(*) FROM old) = %(most)s THEN %(after)s
                WHEN count(*) = %(most)s THEN max(case_id) END AS after FROM page
    """,  # noqa: S608 (constants)
)


# Calls that a person has decided, or that waited for something, stay: they show who decided, and which agents answered.
EFFECTS = Statement(
    "retention.effects",
    f"""
    WITH page AS (
        SELECT effect_id, turn_id, waits_for IS NULL AND decided_by IS NULL AS plain FROM tool_effects
        WHERE effect_id > %(after)s::uuid AND effect_id < {_CUTOFF_ID}
        ORDER BY effect_id LIMIT %(most)s
    ), settled AS (
        SELECT turn_id, session_id FROM turns
        WHERE turn_id = ANY (ARRAY(SELECT DISTINCT turn_id FROM page WHERE plain)) AND settled_at < {_CUTOFF}
    ), old AS (
        SELECT turn_id FROM settled
        WHERE session_id = ANY (ARRAY(
            SELECT session_id FROM sessions
            WHERE session_id = ANY (ARRAY(SELECT DISTINCT session_id FROM settled)) AND ended_at < {_CUTOFF}))
    ), gone AS (
        DELETE FROM tool_effects
        WHERE effect_id = ANY (ARRAY(SELECT effect_id FROM page WHERE plain AND turn_id IN (SELECT turn_id FROM old)))
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           CASE WHEN count(*) = %(most)s THEN max(effect_id::text) END AS after FROM page
    """,  # noqa: S608 (constants)
)

TURN_SPENDINGS = Statement(
    "retention.turn_spendings",
    f"""
    WITH page AS (
        SELECT turn_id FROM turn_spendings
        WHERE turn_id > %(after)s::uuid AND turn_id < {_CUTOFF_ID}
        ORDER BY turn_id LIMIT %(most)s
    ), old AS (
        SELECT turn_id FROM turns WHERE turn_id = ANY (ARRAY(SELECT turn_id FROM page)) AND settled_at < {_CUTOFF}
    ), gone AS (
        DELETE FROM turn_spendings WHERE turn_id = ANY (ARRAY(SELECT turn_id FROM old)) RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           CASE WHEN count(*) = %(most)s THEN max(turn_id::text) END AS after FROM page
    """,  # noqa: S608 (constants)
)

VECTORS = Statement(
    "retention.vectors",
    f"""
    WITH page AS (
        SELECT session_id FROM sessions
        WHERE session_id > %(after)s::uuid AND session_id < {_CUTOFF_ID}
        ORDER BY session_id LIMIT %(most)s
    ), gone AS (
        DELETE FROM message_vectors AS v
        WHERE session_id = ANY (ARRAY(SELECT session_id FROM page))
          AND (SELECT occurred_at FROM message_words AS w
               WHERE w.session_id = v.session_id AND w.seq = v.seq) < {_CUTOFF}
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           CASE WHEN count(*) = %(most)s THEN max(session_id::text) END AS after FROM page
    """,  # noqa: S608 (constants)
)

# Foreign keys are checked at the end of the statement, so the order of the parts does not matter. A session that
# follows a deleted one has ended, too, and no longer names it; a statement cannot both update and delete it. A session
# in which an agent answered another's call has the call's id, and stays as long as the call. A session stays as long as
# one of its forks, or a fork of them, is open: the copied messages show its files. A scalar subquery with a LIMIT stays
# one probe for each session. Files that no message has are deleted by `Files.collect`.
TRANSCRIPTS = Statement(
    "retention.transcripts",
    f"""
    WITH page AS (
        SELECT session_id FROM sessions
        WHERE session_id > %(after)s::uuid AND session_id < {_CUTOFF_ID}
        ORDER BY session_id LIMIT %(most)s
    ), old AS (
        SELECT s.session_id FROM sessions AS s
        WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM page)) AND s.ended_at < {_CUTOFF} AND s.unsettled = 0
          AND (s.consolidated_at IS NOT NULL OR s.consolidation_given_up_at IS NOT NULL)
          AND NOT EXISTS (SELECT FROM sessions AS n
                          WHERE n.ended_at IS NULL AND n.previous_session_id = s.session_id LIMIT 1)
          AND NOT EXISTS (
                WITH RECURSIVE forks AS (
                    SELECT n.session_id, n.ended_at FROM sessions AS n WHERE n.forked_from = s.session_id
                    UNION ALL
                    SELECT n.session_id, n.ended_at FROM forks JOIN sessions AS n ON n.forked_from = forks.session_id
                )
                SELECT FROM forks WHERE ended_at IS NULL LIMIT 1)
          AND (s.depth = 0 OR NOT EXISTS (SELECT FROM tool_effects AS e WHERE e.effect_id = s.session_id LIMIT 1))
          AND (SELECT m.memory_id FROM memory_sources AS m WHERE m.session_id = s.session_id LIMIT 1) IS NULL
          AND (SELECT d.delivery_id FROM turns AS t JOIN deliveries AS d USING (turn_id)
               WHERE t.session_id = s.session_id AND d.status = 'pending' LIMIT 1) IS NULL
        FOR UPDATE SKIP LOCKED
    ), of_turns AS (
        SELECT turn_id FROM turns WHERE session_id = ANY (ARRAY(SELECT session_id FROM old))
    ), following AS (
        UPDATE sessions SET previous_session_id = NULL
        WHERE previous_session_id = ANY (ARRAY(SELECT session_id FROM old))
          AND session_id <> ALL (ARRAY(SELECT session_id FROM old))
    ), unused AS (
        UPDATE files SET used_at = NULL, session_id = NULL WHERE session_id = ANY (ARRAY(SELECT session_id FROM old))
    ), d1 AS (
        DELETE FROM message_words WHERE session_id = ANY (ARRAY(SELECT session_id FROM old))
    ), d2 AS (
        DELETE FROM unembedded WHERE kind = 'message' AND id = ANY (ARRAY(SELECT session_id FROM old))
    ), d3 AS (
        DELETE FROM messages WHERE session_id = ANY (ARRAY(SELECT session_id FROM old))
    ), d4 AS (
        DELETE FROM snapshots WHERE session_id = ANY (ARRAY(SELECT session_id FROM old))
    ), d5 AS (
        DELETE FROM tool_effects WHERE turn_id = ANY (ARRAY(SELECT turn_id FROM of_turns))
    ), d6 AS (
        DELETE FROM deliveries WHERE turn_id = ANY (ARRAY(SELECT turn_id FROM of_turns))
    ), d7 AS (
        DELETE FROM inbox WHERE turn_id = ANY (ARRAY(SELECT turn_id FROM of_turns))
    ), d8 AS (
        DELETE FROM turns WHERE turn_id = ANY (ARRAY(SELECT turn_id FROM of_turns))
    ), gone AS (
        DELETE FROM sessions WHERE session_id = ANY (ARRAY(SELECT session_id FROM old)) RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           CASE WHEN count(*) = %(most)s THEN max(session_id::text) END AS after FROM page
    """,  # noqa: S608 (constants)
)

# A conversation in which nothing is remembered stays: a later message in it must not be remembered either. Opening a
# session updates the conversation's row, so that its `ctid` is another one then, and the row is not deleted. Some
# versions of PostgreSQL compare it again after an update only as a text.
CONVERSATIONS = Statement(
    "retention.conversations",
    f"""
    WITH page AS (
        SELECT ctid, user_id, conversation, created_at < {_CUTOFF} AND remember AS old FROM conversations
        WHERE (user_id, conversation) > (%(after)s::jsonb ->> 0, %(after)s::jsonb ->> 1)
        ORDER BY user_id, conversation LIMIT %(most)s
    ), empty AS (
        SELECT c.ctid FROM page AS c
        WHERE c.old AND (SELECT s.session_id FROM sessions AS s
                         WHERE s.user_id = c.user_id AND s.scope = '/' || c.conversation LIMIT 1) IS NULL
    ), gone AS (
        DELETE FROM conversations
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM empty)) AND ctid::text = ANY (ARRAY(SELECT ctid::text FROM empty))
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) AS deleted,
           (SELECT jsonb_build_array(user_id, conversation)::text FROM page
            ORDER BY user_id, conversation OFFSET %(most)s - 1) AS after
    """,  # noqa: S608 (constants)
)


@dataclass(frozen=True, slots=True)
class Kept:
    """A kind of row, its retention, and the statement that deletes old rows.

    `days`: the days of the settings; 0: for ever.
    `start`: the key after which the scan of the table starts. `batch`: the maximum number of rows per commit.
    """

    what: str
    days: Callable[[RetentionSettings], int]
    delete: Statement
    start: str = ""
    batch: int | None = None


KEPT = (
    Kept("deliveries", lambda settings: settings.deliveries_days, DELIVERIES),
    Kept("snapshots set aside", lambda settings: settings.snapshots_days, SET_ASIDE),
    Kept("snapshots of ended sessions", lambda settings: settings.snapshots_days, OF_ENDED_SESSIONS, start=_FIRST_ID),
    Kept("messages in the inbox", lambda settings: settings.inbox_days, INBOX, start=_FIRST_ID),
    Kept("uses of cases", lambda settings: settings.executions_days, USES),
    Kept("dry runs of the CaseBank", lambda settings: settings.audit_days, DRY_RUNS, batch=10),
    Kept("operators' actions", lambda settings: settings.audit_days, AUDIT),
    Kept("codes that link channels", lambda _: 1, LINK_CODES),
    Kept("attempts to link channels", lambda _: 1, LINK_ATTEMPTS),
    Kept("answered requests", lambda _: 7, ANSWERED_REQUESTS),
    Kept("costs of turns, for budgets", lambda _: 7, TURN_SPENDINGS, start=_FIRST_ID),
    Kept("costs of days, for budgets", lambda _: 7, DAY_SPENDINGS),
    Kept("side requests and forks", lambda settings: settings.events_days, METERED_REQUESTS),
    Kept("refused and joined messages of applications", lambda settings: settings.events_days, UNROUTED),
    Kept("tool calls of ended sessions", lambda settings: settings.effects_days, EFFECTS, start=_FIRST_ID),
    Kept("vectors of messages", lambda settings: settings.vectors_days, VECTORS, start=_FIRST_ID, batch=50),
    Kept("ended sessions", lambda settings: settings.transcripts_days, TRANSCRIPTS, start=_FIRST_ID, batch=100),
    Kept(
        "conversations without a session", lambda settings: settings.transcripts_days, CONVERSATIONS, start='["", ""]'
    ),
)


def retain(
    database: Database,
    go_on: Callable[[], bool] = lambda: True,
    settings: RetentionSettings = RetentionSettings(),  # noqa: B008 (frozen)
) -> dict[str, int]:
    """Delete all rows past their retention, one commit per batch; returns the number of deleted rows by kind.

    Calls `go_on` between commits, and stops if `go_on` returns False. The next call of `retain` deletes the remaining
    rows. If a kind of row cannot be deleted, the other kinds are deleted before the error is raised.
    """
    deleted, failures = dict[str, int](), list[Exception]()
    for kept in KEPT:
        try:
            days = kept.days(settings)
            deleted[kept.what] = _deleted(database, kept, days, go_on) if days else 0
        except Exception as error:  # noqa: BLE001 (raised below)
            log.warning("retention of %s failed: %s", kept.what, loggable(error))
            failures.append(error)
    if failures:
        raise failures[0]
    return deleted


def _deleted(database: Database, kept: Kept, days: int, go_on: Callable[[], bool]) -> int:
    deleted = 0
    after: str | None = kept.start
    batch = min(kept.batch or _BATCH, _BATCH)
    while after is not None and go_on():
        given = {"days": days, "most": batch, "executions": EXECUTIONS, "after": after}
        row = database.run(kept.delete, given)[0]
        deleted, after = deleted + row.deleted, row.after
    return deleted
