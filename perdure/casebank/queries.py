"""Every statement of the CaseBank, named, in the order of a case's life.

A turn locks no case: it appends to `case_executions`, and COUNT_USES adds those rows to the cases later. Until
then whatever reads a case's usage adds the uncounted rows (`FRESH`). Statements that lock several cases lock
them in the order of their ids, so that runs, reflection and restores cannot deadlock. What a run writes
depends on its fencing token.

Over 500 lines on purpose: who locks what, and in which order, is read in one place.
"""

from __future__ import annotations

from typing import Any, Protocol

from perdure.database.engine import Statement
from perdure.tenants import OF_TENANT


class CaseRow(Protocol):
    """A row of any statement here that returns what the policy knows of a case."""

    case_id: str
    usage_count: int
    success_rate: float | None
    last_accessed_at: Any
    created_at: Any
    restored_at: Any


_COPIED = """query, response_text, category_path, query_vector, embedder, usage_count, success_rate, last_accessed_at,
           created_at, user_id, turn_id, review"""
"""The columns that a case and its archive row share."""

FRESH = """
    LEFT JOIN LATERAL (
        SELECT count(*) AS uses, max(e.executed_at) AS at FROM case_executions AS e
        WHERE e.case_id = c.case_id AND NOT e.counted
    ) AS fresh ON true
"""
"""A case's uses that are not counted yet."""

USAGE = "c.usage_count + fresh.uses AS usage_count, greatest(c.last_accessed_at, fresh.at) AS last_accessed_at"

_RESTORED_AT = "(SELECT max(a.restored_at) FROM case_archive AS a WHERE a.case_id = c.case_id) AS restored_at"

# --- add, read ---------------------------------------------------------------------------

NOW = Statement("casebank.now", "SELECT perdure_now() AS now", writes=False)

# A case that is there already, by its id or by the turn that it was learnt from, is left alone.
# One that comes archived has its archive row, so that it can be restored.
ADD = Statement(
    "casebank.add",
    f"""
    WITH added AS (
        INSERT INTO cases (case_id, query, response_text, category_path, query_vector, embedder, usage_count,
                           success_rate, last_accessed_at, created_at, user_id, turn_id, status, bank, shared_at)
        VALUES (%(case_id)s, %(query)s, %(response_text)s, %(category_path)s, %(query_vector)s::vector, %(embedder)s,
                %(usage_count)s, %(success_rate)s, %(last_accessed_at)s, coalesce(%(created_at)s, perdure_now()),
                %(user_id)s, %(turn_id)s::uuid, %(status)s, %(bank)s, %(shared_at)s)
        ON CONFLICT DO NOTHING
        RETURNING *
    ), kept AS (
        INSERT INTO case_archive (case_id, {_COPIED}, archived_at, archived_reason)
        SELECT case_id, {_COPIED}, perdure_now(), 'archived when it was imported' FROM added WHERE status = 'archived'
    ), told AS (
        INSERT INTO case_history (case_id, event, reason, at)
        SELECT case_id, 'added', %(reason)s, perdure_now() FROM added
    )
    SELECT case_id FROM added
    """,  # noqa: S608 (constants)
)

_CASE = f"""
    SELECT c.case_id, c.query, c.response_text, c.category_path, c.embedder, c.user_id, c.bank, c.shared_at,
           {USAGE}, c.success_rate, c.status, c.created_at, c.review, {_RESTORED_AT}
    FROM cases AS c {FRESH}
"""  # noqa: S608 (constants)

READ = Statement("casebank.read", _CASE + " WHERE c.case_id = %(case_id)s", writes=False)

LIST = Statement(
    "casebank.list",
    _CASE
    + """
    WHERE c.case_id > %(after)s AND (%(status)s::text IS NULL OR c.status = %(status)s)
          AND (NOT %(flagged)s OR c.review IS NOT NULL) AND (%(bank)s::text IS NULL OR c.bank = %(bank)s)
    """
    + f"""
          AND (%(tenant)s::text IS NULL OR {OF_TENANT.format(column="c.user_id")})
    ORDER BY c.case_id LIMIT %(most)s
    """,
    writes=False,
)

EXPORT = Statement(
    "casebank.export",
    f"""
    SELECT c.case_id, c.query, c.response_text, c.category_path, c.query_vector::real[] AS query_vector, c.embedder,
           c.user_id, c.bank, c.shared_at, {USAGE}, c.success_rate, c.status, c.created_at
    FROM cases AS c {FRESH}
    WHERE c.case_id > %(after)s AND (%(tenant)s::text IS NULL OR {OF_TENANT.format(column="c.user_id")})
          AND (%(bank)s::text IS NULL OR c.bank = %(bank)s)
    ORDER BY c.case_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

AUTHOR = Statement("casebank.author", "SELECT user_id FROM cases WHERE case_id = %(case_id)s", writes=False)

HISTORY = Statement(
    "casebank.history",
    """
    SELECT event, reason, details, run_id, at FROM case_history WHERE case_id = %(case_id)s ORDER BY history_id
    """,
    writes=False,
)

# Cases that no search finds; with an embedder, those that none by it does.
WITHOUT_VECTOR = Statement(
    "casebank.without_vector",
    """
    SELECT case_id, query FROM cases
    WHERE status = 'active' AND case_id > %(after)s AND (query_vector IS NULL OR embedder <> %(embedder)s::text)
    ORDER BY case_id LIMIT %(most)s
    """,
    writes=False,
)

GIVE_VECTOR = Statement(
    "casebank.give_vector",
    """
    UPDATE cases SET query_vector = %(query_vector)s::vector, embedder = %(embedder)s
    WHERE case_id = %(case_id)s AND status = 'active' AND query = %(query)s
    RETURNING case_id
    """,
)

# --- vector indexes ---------------------------------------------------------------------

_INDEXED = {"shared": "user_id IS NULL", "learnt": "user_id IS NOT NULL"}

SIZES = Statement(
    "casebank.sizes",
    """
    SELECT vector_dims(query_vector) AS size, count(*) FILTER (WHERE user_id IS NULL) AS shared,
           count(*) FILTER (WHERE user_id IS NOT NULL) AS learnt
    FROM cases WHERE status = 'active' AND query_vector IS NOT NULL GROUP BY 1 ORDER BY 1
    """,
    writes=False,
)


def index_name(size: int, part: str) -> str:
    """The name of the index over the `shared` or the `learnt` cases with vectors of `size` dimensions."""
    return f"cases_{part}_nearest_{size:d}_idx"


def index(size: int, part: str) -> str:
    """The SQL that builds that index without blocking readers and writers."""
    return f"""
        CREATE INDEX CONCURRENTLY IF NOT EXISTS {index_name(size, part)}
        ON cases USING hnsw ((query_vector::vector({size:d})) vector_cosine_ops)
        WHERE status = 'active' AND vector_dims(query_vector) = {size:d} AND {_INDEXED[part]}
    """


def index_is_broken(size: int, part: str) -> str:
    """The SQL that asks whether building that index was interrupted, or is under way elsewhere."""
    return f"""
        SELECT EXISTS (SELECT FROM pg_index
                       WHERE indexrelid = to_regclass('{index_name(size, part)}') AND NOT indisvalid)
    """  # noqa: S608 (a number and a constant)


def drop_index_of_all(size: int) -> str:
    """Drop the index over all cases, which releases before revision 0018 searched."""
    return f"DROP INDEX CONCURRENTLY IF EXISTS cases_nearest_{size}_idx"


def drop_index(size: int, part: str) -> str:
    """The SQL that drops it without blocking readers and writers."""
    return f"DROP INDEX CONCURRENTLY IF EXISTS {index_name(size, part)}"


# One process at a time builds indexes: to another, one that is being built looks like one that was broken off.
# The lock is the connection's, and goes with it.
_BUILDING = "hashtextextended('perdure casebank indexes', 0)"
TAKE_BUILDING = f"SELECT pg_try_advisory_lock({_BUILDING})"
END_BUILDING = f"SELECT pg_advisory_unlock({_BUILDING})"

# --- use ---------------------------------------------------------------------------------

# A CTE for the statement that settles a turn, after the CTE `fenced`: one row for each case that was in the turn's
# prompt. It reads and locks no case; a case that is archived or erased at that moment does not stop it.
WITH_USES = """
    used AS (
        INSERT INTO case_executions (case_id, turn_id, succeeded, error, executed_at, counted)
        SELECT u.case_id, %(turn_id)s::uuid, %(status)s::text = 'done', %(error_code)s, perdure_now(), false
        FROM fenced, unnest(%(case_ids)s::text[]) AS u (case_id)
        ON CONFLICT DO NOTHING
    )
"""

_COUNTED = """
    fresh AS (
        SELECT e.case_id, e.turn_id FROM case_executions AS e JOIN page USING (case_id) WHERE NOT e.counted
        FOR NO KEY UPDATE OF e SKIP LOCKED
    ), counted AS (
        UPDATE case_executions AS e SET counted = true
        FROM fresh WHERE e.case_id = fresh.case_id AND e.turn_id = fresh.turn_id
        RETURNING e.case_id, e.executed_at
    ), uses AS (
        SELECT case_id, count(*) AS uses, max(executed_at) AS at FROM counted GROUP BY case_id
    ), added AS (
        UPDATE cases AS c
        SET usage_count = c.usage_count + uses.uses, last_accessed_at = greatest(c.last_accessed_at, uses.at)
        FROM uses WHERE c.case_id = uses.case_id
        RETURNING uses.uses
    )
"""

# Adds uses to a page of active cases; returns the page's last case, NULL after the last page. A use is counted by the
# transaction that marks it, so exactly once. What another transaction has locked (a run a case, feedback a use) is left
# to the next round, and the uses of an archived case until it is restored.
COUNT_USES = Statement(
    "casebank.count_uses",
    f"""
    WITH due AS (
        SELECT DISTINCT case_id FROM case_executions WHERE NOT counted AND case_id > %(after)s
        ORDER BY case_id LIMIT %(most)s
    ), page AS (
        SELECT c.case_id FROM cases AS c JOIN due USING (case_id) WHERE c.status = 'active'
        ORDER BY c.case_id FOR NO KEY UPDATE OF c SKIP LOCKED
    ), {_COUNTED.strip()}
    SELECT max(case_id) AS last, (SELECT coalesce(sum(uses), 0)::bigint FROM added) AS uses FROM due
    """,  # noqa: S608 (constants)
)

# The same for cases that the caller's transaction has locked.
COUNT_USES_OF = Statement(
    "casebank.count_uses_of",
    f"""
    WITH page AS (
        SELECT case_id FROM cases WHERE case_id = ANY (%(case_ids)s::text[]) AND status = 'active'
    ), {_COUNTED.strip()}
    SELECT coalesce(sum(uses), 0)::bigint AS uses FROM added
    """,  # noqa: S608 (constants)
)

# What a turn recorded of a case that was erased at that moment.
FORGET_USES = Statement(
    "casebank.forget_uses",
    """
    DELETE FROM case_executions AS e
    WHERE NOT e.counted AND NOT EXISTS (SELECT FROM cases AS c WHERE c.case_id = e.case_id)
    """,
)

FEEDBACK = Statement(
    "casebank.feedback",
    "UPDATE case_executions SET feedback = %(score)s WHERE turn_id = %(turn_id)s::uuid RETURNING case_id",
)

# --- reflect -----------------------------------------------------------------------------

# Sets the rate of a page of cases from their newest executions, and says of those that fail
# more often than not how. A suggestion stays while the case is flagged.
REFLECT = Statement(
    "casebank.reflect",
    """
    WITH page AS (
        SELECT c.case_id FROM cases AS c
        WHERE c.status = 'active' AND c.case_id > %(after)s
              AND EXISTS (SELECT FROM case_executions AS e WHERE e.case_id = c.case_id)
        ORDER BY c.case_id LIMIT %(most)s
        FOR NO KEY UPDATE
    ), newest AS (
        SELECT page.case_id, e.good, e.error
        FROM page, LATERAL (
            SELECT coalesce(feedback > 0, succeeded) AS good,
                   coalesce(error, CASE WHEN feedback < 0 THEN 'negative feedback' END, 'unknown error') AS error
            FROM case_executions WHERE case_id = page.case_id
            ORDER BY executed_at DESC, turn_id DESC LIMIT %(executions)s
        ) AS e
    ), rated AS (
        SELECT case_id, 100.0 * count(*) FILTER (WHERE good) / count(*) AS rate, count(*) AS executions
        FROM newest GROUP BY case_id
    ), errors AS (
        SELECT case_id, jsonb_agg(jsonb_build_object('error', error, 'count', times)
                                  ORDER BY times DESC, error COLLATE "C") FILTER (WHERE place <= %(errors)s) AS errors
        FROM (
            SELECT case_id, error, count(*) AS times,
                   row_number() OVER (PARTITION BY case_id ORDER BY count(*) DESC, error COLLATE "C") AS place
            FROM newest WHERE NOT good GROUP BY case_id, error
        ) AS counted
        GROUP BY case_id
    ), judged AS (
        UPDATE cases AS c
        SET success_rate = rated.rate,
            review = CASE WHEN rated.rate < %(flag_below)s THEN
                coalesce(c.review, '{}') || jsonb_build_object(
                    'executions', rated.executions, 'errors', errors.errors,
                    'flagged_at', coalesce(c.review -> 'flagged_at', to_jsonb(perdure_now()))) END
        FROM rated LEFT JOIN errors USING (case_id)
        WHERE c.case_id = rated.case_id
        RETURNING c.case_id, c.review IS NOT NULL AS flagged
    )
    SELECT case_id, flagged FROM judged ORDER BY case_id
    """,
)

# Whoever moves the minute ahead may ask the model for this minute's suggestions.
TAKE_MINUTE = Statement(
    "casebank.take_minute",
    """
    INSERT INTO sweeps AS s (name, due_at) VALUES ('casebank.suggest', perdure_now() + interval '1 minute')
    ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at
    WHERE s.due_at <= perdure_now() OR s.due_at > excluded.due_at + interval '1 second'
    RETURNING s.name
    """,
)

ASK = Statement(
    "casebank.ask",
    """
    WITH wanting AS (
        SELECT case_id FROM cases
        WHERE status = 'active' AND review IS NOT NULL AND NOT review ? 'suggestion'
              AND coalesce((review ->> 'asked_at')::timestamptz < perdure_now() - interval '20 hours', true)
        ORDER BY case_id LIMIT %(most)s
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE cases AS c SET review = c.review || jsonb_build_object('asked_at', perdure_now())
    FROM wanting WHERE c.case_id = wanting.case_id
    RETURNING c.case_id, c.query, c.response_text, c.success_rate, c.review
    """,
)

SUGGEST = Statement(
    "casebank.suggest",
    """
    UPDATE cases SET review = review || jsonb_build_object('suggestion', %(suggestion)s::text)
    WHERE case_id = %(case_id)s AND status = 'active' AND review IS NOT NULL
    RETURNING case_id
    """,
)

# --- plan --------------------------------------------------------------------------------

CANDIDATES = Statement(
    "casebank.candidates",
    f"""
    SELECT c.case_id, c.query, c.user_id, c.bank, c.shared_at, c.embedder, vector_send(c.query_vector) AS vector,
           {USAGE}, c.success_rate, c.created_at, {_RESTORED_AT}
    FROM cases AS c {FRESH}
    WHERE c.status = 'active' AND c.case_id > %(after)s
    ORDER BY c.case_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

COUNT_ACTIVE = Statement(
    "casebank.count_active", "SELECT count(*) AS cases FROM cases WHERE status = 'active'", writes=False
)

# --- run ---------------------------------------------------------------------------------

# At most one run and one dry run are unfinished (two unique indexes). Without `lease_s` no process holds the new run.
BEGIN = Statement(
    "casebank.begin",
    """
    INSERT INTO case_runs (run_id, dry_run, phase, started_at, lease_until)
    VALUES (%(run_id)s::uuid, %(dry_run)s, 'planning', perdure_now(),
            perdure_now() + make_interval(secs => %(lease_s)s::float))
    ON CONFLICT DO NOTHING
    RETURNING run_id, dry_run, phase, token, planned_at
    """,
)

_RUN = """
    SELECT run_id, dry_run, phase, done, total, started_at, planned_at, notified_at, expires_at, decided_by,
           finished_at, error, coalesce(lease_until > perdure_now(), false) AS held
    FROM case_runs
"""

UNDER_WAY = Statement("casebank.under_way", _RUN + " WHERE finished_at IS NULL AND dry_run = %(dry_run)s", writes=False)
READ_RUN = Statement("casebank.read_run", _RUN + " WHERE run_id = %(run_id)s::uuid", writes=False)
LIST_RUNS = Statement(
    "casebank.list_runs", _RUN + " ORDER BY started_at DESC, run_id DESC LIMIT %(most)s", writes=False
)

# Takes up an unfinished run that no process holds, a dry run last; with `dry_runs` false no dry run. One that waits for
# approval is not taken up.
TAKE_OVER = Statement(
    "casebank.take_over",
    """
    UPDATE case_runs SET token = token + 1, lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
    WHERE run_id = (
            SELECT run_id FROM case_runs
            WHERE finished_at IS NULL AND phase <> 'waiting_approval' AND coalesce(lease_until <= perdure_now(), true)
              AND (%(dry_runs)s OR NOT dry_run)
            ORDER BY dry_run LIMIT 1
            FOR NO KEY UPDATE SKIP LOCKED)
    RETURNING run_id, dry_run, phase, token, planned_at
    """,
)

# A run that stands still holds its lease no longer than this: each piece of work renews it.
PROGRESS = Statement(
    "casebank.progress",
    """
    UPDATE case_runs
    SET done = %(done)s, total = %(total)s, lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
    WHERE run_id = %(run_id)s::uuid AND token = %(token)s AND finished_at IS NULL
    RETURNING run_id
    """,
)

RELEASE = Statement(
    "casebank.release",
    """
    UPDATE case_runs SET lease_until = NULL, error = %(error)s
    WHERE run_id = %(run_id)s::uuid AND token = %(token)s AND finished_at IS NULL
    """,
)

PLANNED_AT = Statement(
    "casebank.planned_at",
    """
    WITH fenced AS (
        UPDATE case_runs SET planned_at = perdure_now(), error = NULL
        WHERE run_id = %(run_id)s::uuid AND token = %(token)s AND phase = 'planning'
        RETURNING run_id, planned_at
    ), cleared AS (
        DELETE FROM case_run_items AS i USING fenced WHERE i.run_id = fenced.run_id
    )
    SELECT planned_at FROM fenced
    """,
)

WRITE_ITEMS = Statement(
    "casebank.write_items",
    """
    WITH fenced AS (
        SELECT run_id FROM case_runs
        WHERE run_id = %(run_id)s::uuid AND token = %(token)s AND phase = 'planning' FOR NO KEY UPDATE
    )
    INSERT INTO case_run_items (run_id, position, action, case_id, rule, reason, keeper_id, similarity, keeper_weight,
                                usage_count, success_rate, last_accessed_at)
    SELECT fenced.run_id, i.*
    FROM fenced, jsonb_to_recordset(%(items)s::jsonb) AS i (
        position int, action text, case_id text, rule text, reason text, keeper_id text, similarity float8,
        keeper_weight bigint, usage_count bigint, success_rate float8, last_accessed_at timestamptz)
    RETURNING position
    """,
)

# From one phase to the next; the last ones finish the run. A run that waits holds no lease.
ENTER = Statement(
    "casebank.enter",
    """
    UPDATE case_runs
    SET phase = %(phase)s, done = 0, total = %(total)s, error = coalesce(%(error)s, error),
        notified_at = CASE WHEN %(notified)s THEN perdure_now() ELSE notified_at END,
        expires_at = CASE WHEN %(phase)s = 'waiting_approval'
                          THEN perdure_now() + make_interval(secs => %(expires_s)s) ELSE expires_at END,
        finished_at = CASE WHEN %(finished)s THEN perdure_now() END,
        lease_until = CASE WHEN %(finished)s OR %(phase)s = 'waiting_approval' THEN NULL
                           ELSE perdure_now() + make_interval(secs => %(lease_s)s) END
    WHERE run_id = %(run_id)s::uuid AND token = %(token)s AND finished_at IS NULL
    RETURNING run_id
    """,
)

DECIDE = Statement(
    "casebank.decide",
    """
    UPDATE case_runs
    SET phase = %(phase)s, decided_by = %(by)s, token = token + 1,
        finished_at = CASE WHEN %(phase)s = 'rejected' THEN perdure_now() END
    WHERE run_id = %(run_id)s::uuid AND phase = 'waiting_approval' AND expires_at > perdure_now()
    RETURNING run_id
    """,
)

EXPIRE = Statement(
    "casebank.expire",
    """
    UPDATE case_runs SET phase = 'expired', finished_at = perdure_now(), token = token + 1
    WHERE phase = 'waiting_approval' AND expires_at <= perdure_now()
    RETURNING run_id
    """,
)

COUNTS = Statement(
    "casebank.counts",
    """
    SELECT count(*) AS planned, count(outcome) AS handled
    FROM case_run_items WHERE run_id = %(run_id)s::uuid AND action <> 'spare'
    """,
    writes=False,
)

ITEMS = Statement(
    "casebank.items",
    """
    SELECT position, action, case_id, rule, reason, keeper_id, similarity, outcome, outcome_rule, outcome_reason
    FROM case_run_items WHERE run_id = %(run_id)s::uuid AND position > %(after)s
    ORDER BY position LIMIT %(most)s
    """,
    writes=False,
)

# The plan's lines with the texts that they speak of, for people.
REPORT = Statement(
    "casebank.report",
    """
    SELECT i.position, i.action, i.case_id, i.rule, i.reason, i.keeper_id, i.similarity, i.usage_count, i.success_rate,
           i.last_accessed_at, i.outcome, i.outcome_rule, i.outcome_reason, c.query, c.response_text,
           k.query AS keeper_query, k.response_text AS keeper_response_text
    FROM case_run_items AS i
    LEFT JOIN cases AS c ON c.case_id = i.case_id LEFT JOIN cases AS k ON k.case_id = i.keeper_id
    WHERE i.run_id = %(run_id)s::uuid AND i.position > %(after)s
          AND (%(action)s::text IS NULL OR i.action = %(action)s)
    ORDER BY i.position LIMIT %(most)s
    """,
    writes=False,
)

# --- apply -------------------------------------------------------------------------------

FENCE = Statement(
    "casebank.fence",
    """
    SELECT perdure_now() AS now FROM case_runs
    WHERE run_id = %(run_id)s::uuid AND token = %(token)s AND phase = 'applying' FOR NO KEY UPDATE
    """,
)

PENDING = Statement(
    "casebank.pending",
    """
    SELECT position, action, case_id, rule, reason, keeper_id, similarity, keeper_weight, usage_count, success_rate,
           last_accessed_at
    FROM case_run_items
    WHERE run_id = %(run_id)s::uuid AND position > %(after)s AND action <> 'spare' AND outcome IS NULL
    ORDER BY position LIMIT %(most)s
    """,
    writes=False,
)

LOCK_CASES = Statement(
    "casebank.lock_cases",
    "SELECT FROM cases WHERE case_id = ANY (%(case_ids)s::text[]) ORDER BY case_id FOR NO KEY UPDATE",
)

LOCKED_CASES = Statement(
    "casebank.locked_cases",
    f"""
    SELECT c.case_id, c.status, c.query, c.user_id, c.bank, c.shared_at, c.embedder, c.usage_count, c.success_rate,
           c.last_accessed_at, c.created_at,
           CASE WHEN c.case_id = ANY (%(compared)s::text[]) THEN vector_send(c.query_vector) END AS vector,
           {_RESTORED_AT}
    FROM cases AS c WHERE c.case_id = ANY (%(case_ids)s::text[])
    """,  # noqa: S608 (constants)
    writes=False,
)

# What the keepers have taken over in this run so far, and the uses of it that a rate speaks for.
TAKEN_OVER = Statement(
    "casebank.taken_over",
    """
    SELECT keeper_id, sum(usage_count)::bigint AS uses,
           coalesce(sum(usage_count) FILTER (WHERE success_rate IS NOT NULL), 0)::bigint AS rated
    FROM case_run_items
    WHERE run_id = %(run_id)s::uuid AND action = 'merge' AND outcome = 'done'
          AND keeper_id = ANY (%(keeper_ids)s::text[])
    GROUP BY keeper_id
    """,
    writes=False,
)

# A batch goes: archive rows as the cases were, then their status, their history, their lines
# of the plan, and the keepers' new counts.
ARCHIVE = Statement(
    "casebank.archive",
    f"""
    WITH going AS (
        SELECT * FROM jsonb_to_recordset(%(going)s::jsonb) AS g (
            position int, case_id text, rule text, reason text, keeper_id text, similarity float8)
    ), kept AS (
        INSERT INTO case_archive (case_id, {_COPIED}, archived_at, archived_reason, keeper_id, run_id)
        SELECT case_id, {_COPIED}, perdure_now(), going.reason, going.keeper_id, %(run_id)s::uuid
        FROM cases JOIN going USING (case_id) WHERE status = 'active'
        ORDER BY going.position
    ), archived AS (
        UPDATE cases AS c SET status = 'archived' FROM going WHERE c.case_id = going.case_id AND c.status = 'active'
        RETURNING c.case_id
    ), told AS (
        INSERT INTO case_history (case_id, event, reason, details, run_id, at)
        SELECT case_id, 'archived', reason, jsonb_strip_nulls(jsonb_build_object(
                   'rule', rule, 'keeper', keeper_id, 'similarity', similarity)), %(run_id)s::uuid, perdure_now()
        FROM going JOIN archived USING (case_id) ORDER BY going.position
    )
    UPDATE case_run_items AS i SET outcome = 'done'
    FROM going WHERE i.run_id = %(run_id)s::uuid AND i.position = going.position
    RETURNING i.position
    """,  # noqa: S608 (constants)
)

ABSORB = Statement(
    "casebank.absorb",
    """
    WITH keeping AS (
        SELECT * FROM jsonb_to_recordset(%(keepers)s::jsonb) AS k (
            case_id text, usage_count bigint, success_rate float8, last_accessed_at timestamptz, losers jsonb,
            before jsonb)
    ), told AS (
        INSERT INTO case_history (case_id, event, reason, details, run_id, at)
        SELECT case_id, 'absorbed', 'took over the counts of its duplicates',
               jsonb_build_object('losers', losers, 'before', before), %(run_id)s::uuid, perdure_now()
        FROM keeping ORDER BY case_id
    )
    UPDATE cases AS c
    SET usage_count = keeping.usage_count, success_rate = keeping.success_rate,
        last_accessed_at = keeping.last_accessed_at
    FROM keeping WHERE c.case_id = keeping.case_id
    """,
)

SPARE = Statement(
    "casebank.spare",
    """
    UPDATE case_run_items AS i SET outcome = 'spared', outcome_rule = s.rule, outcome_reason = s.reason
    FROM jsonb_to_recordset(%(spared)s::jsonb) AS s (position int, rule text, reason text)
    WHERE i.run_id = %(run_id)s::uuid AND i.position = s.position
    RETURNING i.position
    """,
)

# --- share -------------------------------------------------------------------------------

# Returns the case, and whether this changed it: one that is shared already keeps its time.
SHARE = Statement(
    "casebank.share",
    """
    WITH locked AS (
        SELECT case_id, user_id, shared_at FROM cases WHERE case_id = %(case_id)s FOR NO KEY UPDATE
    ), changed AS (
        UPDATE cases AS c SET shared_at = CASE WHEN %(shared)s THEN perdure_now() END
        FROM locked
        WHERE c.case_id = locked.case_id AND locked.user_id IS NOT NULL
              AND (locked.shared_at IS NOT NULL) IS DISTINCT FROM %(shared)s
        RETURNING c.case_id, c.shared_at
    ), told AS (
        INSERT INTO case_history (case_id, event, reason, details, at)
        SELECT case_id, CASE WHEN %(shared)s THEN 'shared' ELSE 'unshared' END, %(reason)s,
               jsonb_build_object('by', %(by)s::text), perdure_now()
        FROM changed
    )
    SELECT locked.user_id, changed.case_id IS NOT NULL AS changed,
           CASE WHEN changed.case_id IS NULL THEN locked.shared_at ELSE changed.shared_at END AS shared_at
    FROM locked LEFT JOIN changed USING (case_id)
    """,
)

# --- restore -----------------------------------------------------------------------------

RESTORE = Statement(
    "casebank.restore",
    """
    WITH locked AS (
        SELECT case_id FROM cases WHERE case_id = %(case_id)s AND status = 'archived' FOR NO KEY UPDATE
    ), newest AS (
        SELECT a.* FROM case_archive AS a JOIN locked USING (case_id)
        WHERE a.restored_at IS NULL ORDER BY a.archive_id DESC LIMIT 1
    ), marked AS (
        UPDATE case_archive AS a SET restored_at = perdure_now() FROM newest WHERE a.archive_id = newest.archive_id
    ), told AS (
        INSERT INTO case_history (case_id, event, reason, details, at)
        SELECT case_id, 'restored', 'on request', jsonb_build_object('archive_id', archive_id), perdure_now()
        FROM newest
    )
    UPDATE cases AS c
    SET status = 'active', query = a.query, response_text = a.response_text, category_path = a.category_path,
        query_vector = a.query_vector, embedder = a.embedder, usage_count = a.usage_count,
        success_rate = a.success_rate, last_accessed_at = a.last_accessed_at, created_at = a.created_at,
        user_id = a.user_id, turn_id = a.turn_id, review = a.review
    FROM newest AS a WHERE c.case_id = a.case_id
    RETURNING c.case_id
    """,
)
