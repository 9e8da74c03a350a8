"""The SQL statements of pruning runs."""

from __future__ import annotations

from perdure.casebank.queries import ARCHIVED_COLUMNS, RESTORED_AT
from perdure.database.engine import Statement

COUNT_ACTIVE = Statement(
    "casebank.count_active", "SELECT count(*) AS cases FROM cases WHERE status = 'active'", writes=False
)

# Two unique indexes admit at most one unfinished run and one unfinished dry run. If `lease_s` is NULL, the new run is
# unclaimed.
BEGIN = Statement(
    "casebank.begin",
    """
    INSERT INTO case_runs (run_id, dry_run, phase, started_at, lease_until)
    VALUES (%(run_id)s::uuid, %(dry_run)s, 'planning', perdure_now(),
            perdure_now() + make_interval(secs => %(lease_s)s::float))
    ON CONFLICT DO NOTHING
    RETURNING run_id, dry_run, phase, token
    """,
)

_RUN = """
    SELECT run_id, dry_run, phase, done, total, coalesce(lease_until > perdure_now(), false) AS under_way, decided_by,
           error, started_at, planned_at, notified_at, expires_at, finished_at
    FROM case_runs
"""

UNDER_WAY = Statement("casebank.under_way", _RUN + " WHERE finished_at IS NULL AND dry_run = %(dry_run)s", writes=False)

READ_RUN = Statement("casebank.read_run", _RUN + " WHERE run_id = %(run_id)s::uuid", writes=False)

LIST_RUNS = Statement(
    "casebank.list_runs", _RUN + " ORDER BY started_at DESC, run_id DESC LIMIT %(most)s", writes=False
)

# Claims an unfinished run without a valid lease. Runs take precedence over dry runs, which are excluded if `dry_runs`
# is false. A run that waits for approval is not claimed.
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
    RETURNING run_id, dry_run, phase, token
    """,
)

# Each report of progress renews the lease. A run that hangs therefore loses its lease. In the transaction of a batch,
# the statement locks the run, so no other process claims the run before the batch is committed.
PROGRESS = Statement(
    "casebank.progress",
    """
    UPDATE case_runs
    SET done = %(done)s, total = %(total)s, lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
    WHERE run_id = %(run_id)s::uuid AND token = %(token)s AND finished_at IS NULL
    RETURNING perdure_now() AS now
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

# Enters the next phase; a final phase finishes the run. A run that waits for approval has no lease.
ENTER = Statement(
    "casebank.enter",
    """
    UPDATE case_runs
    SET phase = %(phase)s, done = 0, total = %(total)s, error = coalesce(%(error)s, error),
        notified_at = CASE WHEN phase = 'notifying' AND %(phase)s <> 'withheld'
                           THEN perdure_now() ELSE notified_at END,
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

# The plan's items or, if `applied` is true, the items that have an outcome, with this outcome.
ITEMS = Statement(
    "casebank.items",
    """
    SELECT position, case_id, keeper_id, similarity,
           CASE WHEN now_spared THEN 'spare' ELSE action END AS action,
           CASE WHEN now_spared THEN outcome_rule ELSE rule END AS rule,
           CASE WHEN now_spared THEN outcome_reason ELSE reason END AS reason
    FROM case_run_items, LATERAL (SELECT %(applied)s AND coalesce(outcome = 'spared', false) AS now_spared) AS o
    WHERE run_id = %(run_id)s::uuid AND position > %(after)s
          AND (NOT %(applied)s OR action = 'spare' OR outcome IS NOT NULL)
    ORDER BY position LIMIT %(most)s
    """,
    writes=False,
)

# The plan's items with the texts of their cases, for the administrator.
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
           CASE WHEN c.case_id = ANY (%(compared)s::text[]) THEN @vector.vector_send(c.query_vector) END AS vector,
           {RESTORED_AT}
    FROM cases AS c WHERE c.case_id = ANY (%(case_ids)s::text[])
    """,  # noqa: S608 (constants)
    writes=False,
)

# For each keeper, the number of uses that it has absorbed in this run so far, and the number of these uses that came
# from cases with a known rate.
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

# Archives a batch: copies the cases to the archive, then sets their status, and writes their history and the outcome of
# their items.
ARCHIVE = Statement(
    "casebank.archive",
    f"""
    WITH going AS (
        SELECT * FROM jsonb_to_recordset(%(going)s::jsonb) AS g (
            position int, case_id text, rule text, reason text, keeper_id text, similarity float8)
    ), kept AS (
        INSERT INTO case_archive (case_id, {ARCHIVED_COLUMNS}, archived_at, archived_reason, keeper_id, run_id)
        SELECT case_id, {ARCHIVED_COLUMNS}, perdure_now(), going.reason, going.keeper_id, %(run_id)s::uuid
        FROM cases JOIN going USING (case_id) WHERE status = 'active'
        ORDER BY going.position
    ), archived AS (
        UPDATE cases AS c SET status = 'archived' FROM going WHERE c.case_id = going.case_id AND c.status = 'active'
        RETURNING c.case_id
    ), recorded AS (
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
    ), recorded AS (
        INSERT INTO case_history (case_id, event, reason, details, run_id, at)
        SELECT case_id, 'absorbed', 'took over the counts of its duplicates',
               jsonb_build_object('losers', losers, 'before', before, 'after',
                                  jsonb_build_object('usage_count', usage_count, 'success_rate', success_rate)),
               %(run_id)s::uuid, perdure_now()
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
