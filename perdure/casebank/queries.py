"""SQL statements for cases, the indexes on their vectors, executions, and reflection."""

from __future__ import annotations

from perdure.access.tenants import OF_TENANT
from perdure.database.engine import Statement
from perdure.errors import (
    BudgetExhausted,
    CircuitBreakerOpen,
    DeadlineExceeded,
    PerdureError,
    ProviderError,
    RateLimited,
    Unavailable,
)

ARCHIVED_COLUMNS = """query, response_text, category_path, query_vector, embedder, usage_count, success_rate,
           last_accessed_at, created_at, user_id, turn_id, review"""
"""The columns that a case and its archive row share."""

FRESH = """
    LEFT JOIN LATERAL (
        SELECT count(*) AS uses, max(e.executed_at) AS at FROM case_executions AS e
        WHERE e.case_id = c.case_id AND NOT e.counted
    ) AS fresh ON true
"""
"""Joins to each case `c` the number and the latest time of the case's uncounted executions."""

USAGE = "c.usage_count + fresh.uses AS usage_count, greatest(c.last_accessed_at, fresh.at) AS last_accessed_at"

RESTORED_AT = "(SELECT max(a.restored_at) FROM case_archive AS a WHERE a.case_id = c.case_id) AS restored_at"

NOW = Statement("casebank.now", "SELECT perdure_now() AS now", writes=False)

# Whether the vector of the case `c` was imported, and is of another embedder than the installation's at that time.
_FOREIGN = """
    EXISTS (SELECT FROM case_history AS h
            WHERE h.case_id = c.case_id AND h.event = 'added' AND h.details ->> 'embedder' = c.embedder)
""".strip()

# Inserts nothing if a case with this id exists, or a case learnt from this turn. A case that is imported as archived
# gets an archive row, so that it can be restored. The history has the embedder of a vector that this installation did
# not make, and the rate with which the case begins.
ADD = Statement(
    "casebank.add",
    f"""
    WITH added AS (
        INSERT INTO cases (case_id, query, response_text, category_path, query_vector, embedder, usage_count,
                           success_rate, last_accessed_at, created_at, user_id, turn_id, status, bank, shared_at)
        VALUES (%(case_id)s, %(query)s, %(response_text)s, %(category_path)s, %(query_vector)s::@vector.vector,
                %(embedder)s,
                %(usage_count)s, %(success_rate)s, %(last_accessed_at)s, coalesce(%(created_at)s, perdure_now()),
                %(user_id)s, %(turn_id)s::uuid, %(status)s, %(bank)s, %(shared_at)s)
        ON CONFLICT DO NOTHING
        RETURNING *
    ), archived AS (
        INSERT INTO case_archive (case_id, {ARCHIVED_COLUMNS}, archived_at, archived_reason)
        SELECT case_id, {ARCHIVED_COLUMNS}, perdure_now(), 'archived when it was imported'
        FROM added WHERE status = 'archived'
    ), recorded AS (
        INSERT INTO case_history (case_id, event, reason, details, at)
        SELECT case_id, 'added', %(reason)s,
               nullif(jsonb_strip_nulls(jsonb_build_object(
                   'embedder', CASE WHEN embedder <> %(own_embedder)s THEN embedder END,
                   'after', CASE WHEN success_rate IS NOT NULL AND usage_count > 0 THEN
                       jsonb_build_object('usage_count', usage_count, 'success_rate', success_rate) END)), '{{}}'),
               perdure_now()
        FROM added
    )
    SELECT case_id FROM added
    """,  # noqa: S608 (constants)
)

_CASE = f"""
    SELECT c.case_id, c.query, c.response_text, c.category_path, c.embedder, c.user_id, c.bank, c.shared_at,
           {USAGE}, c.success_rate, c.status, c.created_at, c.review, {RESTORED_AT}
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

# Active cases without a vector of `embedder`. Leaves out foreign vectors, unless `reembed`.
WITHOUT_VECTOR = Statement(
    "casebank.without_vector",
    f"""
    SELECT c.case_id, c.query FROM cases AS c
    WHERE c.status = 'active' AND c.case_id > %(after)s
          AND (c.query_vector IS NULL OR c.embedder <> %(embedder)s AND (%(reembed)s OR NOT {_FOREIGN}))
    ORDER BY c.case_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

GIVE_VECTOR = Statement(
    "casebank.give_vector",
    """
    UPDATE cases SET query_vector = %(query_vector)s::@vector.vector, embedder = %(embedder)s
    WHERE case_id = %(case_id)s AND status = 'active' AND query = %(query)s
    RETURNING case_id
    """,
)

_INDEXED = {"shared": "user_id IS NULL", "learnt": "user_id IS NOT NULL"}

SIZES = Statement(
    "casebank.sizes",
    """
    SELECT @vector.vector_dims(query_vector) AS size, count(*) FILTER (WHERE user_id IS NULL) AS shared,
           count(*) FILTER (WHERE user_id IS NOT NULL) AS learnt
    FROM cases WHERE status = 'active' AND query_vector IS NOT NULL GROUP BY 1 ORDER BY 1
    """,
    writes=False,
)


def index_name(size: int, part: str) -> str:
    """The name of the index on the vectors of `size` dimensions. `part` is `shared` or `learnt`, as in `_INDEXED`."""
    return f"cases_{part}_nearest_{size:d}_idx"


def index_definition(size: int, part: str) -> str:
    return f"""
        ON @schema.cases USING hnsw ((query_vector::@vector.vector({size:d})) @vector.vector_cosine_ops)
        WHERE status = 'active' AND @vector.vector_dims(query_vector) = {size:d} AND {_INDEXED[part]}
    """


_OUTAGES: tuple[type[PerdureError], ...] = (
    BudgetExhausted, CircuitBreakerOpen, DeadlineExceeded, ProviderError, RateLimited, Unavailable,
)  # fmt: skip
"""Failures that say nothing about the cases in a turn's prompt."""

# A CTE for the statement that settles a turn; the CTE `fenced` must precede it. Inserts one execution for each case in
# the turn's prompt, unless the turn failed because a service was unavailable. Neither reads nor locks cases, so
# archiving or erasing a case at the same time does not block the statement.
WITH_USES = f"""
    used AS (
        INSERT INTO case_executions (case_id, turn_id, succeeded, error, executed_at, counted)
        SELECT u.case_id, %(turn_id)s::uuid, %(status)s::text = 'done', %(error_code)s, perdure_now(), false
        FROM fenced, unnest(%(case_ids)s::text[]) AS u (case_id)
        WHERE coalesce(%(error_code)s::text, '') <> ALL (ARRAY[{", ".join(f"'{each.code}'" for each in _OUTAGES)}])
        ON CONFLICT DO NOTHING
    )
"""  # noqa: S608 (constants)

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

# Adds uncounted executions to the use counts of a page of active cases. Returns the id of the page's last case, and the
# number of executions added; the id is NULL after the last page. The statement also marks the executions as counted, so
# each counts exactly once. It skips rows that another transaction has locked: a run locks cases, and feedback locks
# executions. The executions of an archived case stay uncounted until the case is restored.
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

# Like COUNT_USES, but for the given cases, which the caller's transaction has locked.
COUNT_USES_OF = Statement(
    "casebank.count_uses_of",
    f"""
    WITH page AS (
        SELECT case_id FROM cases WHERE case_id = ANY (%(case_ids)s::text[]) AND status = 'active'
    ), {_COUNTED.strip()}
    SELECT coalesce(sum(uses), 0)::bigint AS uses FROM added
    """,  # noqa: S608 (constants)
)

# Deletes executions that a turn recorded while their case was being erased.
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

# Sets the success rates of a page of cases from their newest executions. If these are fewer than `executions`, the rate
# with which the case was imported, or that it had after it absorbed its duplicates (`base`), has the weight of the uses
# without executions, so that one failure does not outweigh the uses before. Flags each case with a rate below
# `flag_below` percent, and stores its most frequent errors. A case keeps its suggestion while it is flagged.
REFLECT = Statement(
    "casebank.reflect",
    """
    WITH page AS (
        SELECT c.case_id FROM cases AS c
        WHERE c.status = 'active' AND c.case_id > %(after)s
              AND EXISTS (SELECT FROM case_executions AS e WHERE e.case_id = c.case_id)
        ORDER BY c.case_id LIMIT %(most)s
        FOR NO KEY UPDATE
    ), based AS (
        SELECT page.case_id, base.at, (base.after ->> 'usage_count')::bigint AS uses,
               (base.after ->> 'success_rate')::float8 AS rate
        FROM page, LATERAL (
            SELECT at, details -> 'after' AS after FROM case_history
            WHERE case_id = page.case_id AND jsonb_typeof(details #> '{after,success_rate}') = 'number'
            ORDER BY history_id DESC LIMIT 1
        ) AS base
    ), newest AS (
        SELECT page.case_id, e.good, e.error
        FROM page LEFT JOIN based USING (case_id), LATERAL (
            SELECT coalesce(feedback > 0, succeeded) AS good,
                   coalesce(error, CASE WHEN feedback < 0 THEN 'negative feedback' END, 'unknown error') AS error
            FROM case_executions
            WHERE case_id = page.case_id AND executed_at > coalesce(based.at, '-infinity')
            ORDER BY executed_at DESC, turn_id DESC LIMIT %(executions)s
        ) AS e
    ), known AS (
        SELECT case_id, count(*) AS executions, 100.0 * count(*) FILTER (WHERE good) AS good
        FROM newest GROUP BY case_id
    ), weighed AS (
        SELECT known.*, CASE WHEN based.uses > 0 THEN least(based.uses, %(executions)s - executions) ELSE 0 END AS uses,
               coalesce(based.rate, 0) AS before
        FROM known LEFT JOIN based USING (case_id)
    ), rated AS (
        SELECT case_id, executions, (good + before * uses) / (executions + uses) AS rate FROM weighed
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
    SELECT page.case_id, judged.case_id IS NOT NULL AS rated, coalesce(judged.flagged, false) AS flagged
    FROM page LEFT JOIN judged USING (case_id) ORDER BY case_id
    """,
)

# Returns a row to one caller per minute. That caller asks the model for this minute's suggestions.
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

# Shares or unshares a case, and returns whether this changed the case. A case that is already shared keeps its
# `shared_at`.
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
    ), recorded AS (
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

# If an active case of the same author and bank has this question and answer, records the turn as a praised use of it.
USE_EQUAL = Statement(
    "casebank.use_equal",
    """
    WITH equal AS (
        SELECT case_id FROM cases
        WHERE user_id = %(user_id)s AND bank = %(bank)s AND status = 'active' AND query = %(query)s
              AND response_text = %(response_text)s AND turn_id IS DISTINCT FROM %(turn_id)s::uuid
        ORDER BY case_id LIMIT 1
    ), used AS (
        INSERT INTO case_executions (case_id, turn_id, succeeded, feedback, executed_at, counted)
        SELECT case_id, %(turn_id)s::uuid, true, 1, perdure_now(), false FROM equal
        ON CONFLICT DO NOTHING
    )
    SELECT case_id FROM equal
    """,
)

# Archives the active case that was learnt from a turn. A case that is shared, or that another praised turn has used,
# stays.
WITHDRAW = Statement(
    "casebank.withdraw",
    f"""
    WITH learnt AS (
        SELECT * FROM cases
        WHERE turn_id = %(turn_id)s::uuid AND status = 'active' AND shared_at IS NULL
              AND NOT EXISTS (SELECT FROM case_executions AS e
                              WHERE e.case_id = cases.case_id AND e.turn_id <> cases.turn_id AND e.feedback > 0)
        FOR NO KEY UPDATE
    ), kept AS (
        INSERT INTO case_archive (case_id, {ARCHIVED_COLUMNS}, archived_at, archived_reason)
        SELECT case_id, {ARCHIVED_COLUMNS}, perdure_now(), %(reason)s FROM learnt
    ), recorded AS (
        INSERT INTO case_history (case_id, event, reason, at)
        SELECT case_id, 'archived', %(reason)s, perdure_now() FROM learnt
    )
    UPDATE cases AS c SET status = 'archived' FROM learnt WHERE c.case_id = learnt.case_id RETURNING c.case_id
    """,  # noqa: S608 (constants)
)

# The archived case that was learnt from a turn, if it was archived for this reason.
WITHDRAWN = Statement(
    "casebank.withdrawn",
    """
    SELECT c.case_id FROM cases AS c
    WHERE c.turn_id = %(turn_id)s::uuid AND c.status = 'archived'
          AND (SELECT a.archived_reason FROM case_archive AS a
               WHERE a.case_id = c.case_id AND a.restored_at IS NULL ORDER BY a.archive_id DESC LIMIT 1) = %(reason)s
    """,
    writes=False,
)

# `lacks_vector`: the case has no vector of `embedder`, and none that was imported.
RESTORE = Statement(
    "casebank.restore",
    f"""
    WITH locked AS (
        SELECT case_id FROM cases WHERE case_id = %(case_id)s AND status = 'archived' FOR NO KEY UPDATE
    ), newest AS (
        SELECT a.* FROM case_archive AS a JOIN locked USING (case_id)
        WHERE a.restored_at IS NULL ORDER BY a.archive_id DESC LIMIT 1
    ), marked AS (
        UPDATE case_archive AS a SET restored_at = perdure_now() FROM newest WHERE a.archive_id = newest.archive_id
    ), recorded AS (
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
    RETURNING c.query, c.query_vector IS NULL OR c.embedder <> %(embedder)s::text AND NOT {_FOREIGN} AS lacks_vector
    """,  # noqa: S608 (constants)
)
