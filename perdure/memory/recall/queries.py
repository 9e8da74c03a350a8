"""The SQL statements of recall. Every statement on messages or memories is limited to the rows of one user."""

from __future__ import annotations

import functools

from perdure.database.engine import Statement

CANDIDATES = 60
"""Maximum rows that one search by words or by vectors returns."""

# --- by words ----------------------------------------------------------------------------

# The score is BM25 (Robertson and Zaragoza, 2009) with k1 = 1.2 and b = 0.5. A term counts once per row, even if the
# row repeats it. A term's inverse document frequency is computed over the user's newest rows, including the rows that
# `condition` excludes, and multiplied by the term's share (see `expansion`): 1 for a word of the question without one.
# `words` are the words with shares; the first `own` are the question's own (`said`), whose shares precede those of
# other words with the same stem. They are English, so they need no `perdure_words`, which would lose their places. A
# related word counts as no rarer than the rarest of the question's own that the rows have.
#
# For a user with at most `most_rows` rows, the search is exact and complete. For other users, the index also finds
# older rows, by those of the terms that are uncommon among the newest rows: the question's own, and related ones if
# they are among the `most_telling` heaviest. For a user with at most `most_at_once` rows, one scan of the index looks
# for all of these terms (`few`); each scan reads the index's pending list, which takes longer than the rest. If that
# finds `most_found` rows, and for other users, the index finds rows with two of the terms, then rows with one, up to
# `most_found` rows (`step`, `older`). Heavier terms come first. The cost therefore does not grow with the number of the
# user's rows, nor with the number of rows that contain a common word.
#
# The planner cannot estimate how many rows a CTE has, and joins CTEs row by row. So each row is compared once with each
# term (`matched`), and the weight of a match is read from an array, at the term's place. The constants are `float8`,
# because arithmetic with `numeric` would take longer than reading the rows.
#
# Converting a term to a `tsvector` and back to text quotes the term for `tsquery`. With `strip`, a long row is
# decompressed once instead of once per term. `user_id || ''` keeps the planner from using the index on `user_id`. The
# index on `words` suffices, because each row's `words` also contains the row's user (`perdure_owner`).
_BY_WORDS = """
    asked AS MATERIALIZED (
        SELECT row_number() OVER () AS place, term, said, share, quoted, quoted::tsquery AS query
        FROM (SELECT term, bool_or(said) AS said,
                     CASE WHEN bool_or(said) THEN coalesce(max(share) FILTER (WHERE said), 1) ELSE max(share) END
                       AS share
              FROM (SELECT term, NULL::double precision AS share, true AS said, true AS wanted
                    FROM unnest(tsvector_to_array(perdure_words(%(query)s))) AS term
                    UNION ALL
                    SELECT given.lexeme, (%(shares)s::double precision[])[at], at <= %(own)s, at > %(own)s
                    FROM unnest(to_tsvector('pg_catalog.english', %(words)s)) AS given,
                         unnest(given.positions) AS at) AS each
              GROUP BY term HAVING bool_or(wanted)
              ORDER BY said DESC, share DESC, length(term) DESC, term LIMIT %(most_terms)s) AS shared
        CROSS JOIN LATERAL (SELECT array_to_tsvector(ARRAY[term])::text AS quoted OFFSET 0) AS of_term
    ), newest AS MATERIALIZED (
        SELECT {key}, {condition} AS fits,
               CASE WHEN w.words @@ (SELECT string_agg(quoted, ' | ')::tsquery FROM asked)
                    THEN strip(w.words) END AS words
        FROM {table} AS w WHERE w.user_id = %(user_id)s
        ORDER BY w.{at} DESC LIMIT %(most_rows)s + 1
    ), own AS MATERIALIZED (
        SELECT count(*) AS rows, count(*) > %(most_rows)s AS many FROM newest
    ), matched AS MATERIALIZED (
        SELECT {key}, fits, length(words) AS length, place
        FROM newest CROSS JOIN asked WHERE newest.words @@ asked.query
    ), counted AS MATERIALIZED (
        SELECT place, count(*) AS rows FROM matched GROUP BY place
    ), weighed AS MATERIALIZED (
        SELECT place, term, quoted, said, share, rows <= %(common)s::double precision * all_rows AS uncommon,
               share * CASE WHEN said THEN idf ELSE least(idf, max(idf) FILTER (WHERE said AND rows > 0) OVER ()) END
                 AS weight
        FROM (SELECT known.*, own.rows AS all_rows,
                     ln(1 + ((own.rows - known.rows)::double precision + 0.5) / (known.rows::double precision + 0.5))
                       AS idf
              FROM own CROSS JOIN (
                  SELECT asked.*, coalesce((SELECT rows FROM counted WHERE counted.place = asked.place), 0) AS rows
                  FROM asked OFFSET 0) AS known OFFSET 0) AS rare
    ), of_places AS MATERIALIZED (
        SELECT array_agg(weight ORDER BY place) AS weights, array_agg(share ORDER BY place) AS shares FROM weighed
    ), telling AS MATERIALIZED (
        SELECT quoted, position
        FROM (SELECT quoted, said, row_number() OVER (ORDER BY weight DESC, length(term) DESC, term) AS position
              FROM weighed CROSS JOIN own WHERE own.many AND uncommon) AS ordered
        WHERE said OR position <= %(most_telling)s
    ), sized AS MATERIALIZED (
        SELECT count(*) <= %(most_at_once)s AS small
        FROM (SELECT FROM {table} AS w WHERE w.user_id = %(user_id)s
              ORDER BY w.{at} DESC LIMIT %(most_at_once)s + 1) AS first
    ), few AS MATERIALIZED (
        SELECT {key}, w.words
        FROM (SELECT (array_to_tsvector(ARRAY[perdure_owner(%(user_id)s)])::text
                        || ' & (' || string_agg(quoted, ' | ') || ')')::tsquery AS query
              FROM telling WHERE (SELECT small FROM sized)) AS of_all
        CROSS JOIN LATERAL (
            SELECT {key}, strip(w.words) AS words FROM {table} AS w
            WHERE w.words @@ of_all.query AND w.user_id || '' = %(user_id)s AND {condition}
            LIMIT %(most_found)s) AS w
    ), step AS MATERIALIZED (
        SELECT terms, first.position,
               (array_to_tsvector(ARRAY[perdure_owner(%(user_id)s)])::text || ' & ' || first.quoted
                  || CASE terms WHEN 2 THEN ' & (' || string_agg(other.quoted, ' | ')
                                               FILTER (WHERE other.position > first.position) || ')'
                                 ELSE coalesce(' & !(' || string_agg(other.quoted, ' | ') || ')', '') END)::tsquery
                 AS query
        FROM generate_series(1, 2) AS terms CROSS JOIN telling AS first
        LEFT JOIN telling AS other ON other.position <> first.position
        WHERE NOT (SELECT small FROM sized) OR (SELECT count(*) FROM few) = %(most_found)s
        GROUP BY terms, first.position, first.quoted
        ORDER BY terms DESC, first.position
    ), older AS MATERIALIZED (
        SELECT {key}, w.words
        FROM step CROSS JOIN LATERAL (
            SELECT {key}, strip(w.words) AS words FROM {table} AS w
            WHERE w.words @@ step.query AND w.user_id || '' = %(user_id)s AND {condition}
            LIMIT %(most_found)s) AS w
        LIMIT %(most_found)s
    ), pool AS (
        SELECT {key}, length, place FROM matched WHERE fits
        UNION ALL
        SELECT {key}, length(words), place
        FROM (SELECT DISTINCT {key}, words
              FROM (SELECT * FROM older UNION ALL
                    SELECT * FROM few WHERE (SELECT count(*) FROM few) < %(most_found)s) AS old
              WHERE ({key}) NOT IN (SELECT {key} FROM newest)) AS found
        CROSS JOIN asked WHERE found.words @@ asked.query
    ), scored AS (
        SELECT {key}, min(length) AS length, avg(min(length)) OVER ()::double precision AS mean_length,
               sum((SELECT weights FROM of_places)[place]) AS idf, max((SELECT shares FROM of_places)[place]) AS share
        FROM pool GROUP BY {key}
    ), by_words AS MATERIALIZED (
        SELECT {key}, idf * {weight} AS score, share FROM scored ORDER BY score DESC, {key} LIMIT %(most)s
    )
"""
_WEIGHT = "2.2::double precision / (1.6::double precision + 0.6::double precision * length / mean_length)"

# Excludes the messages that the prompt contains, and the sessions in `exclude_sessions`.
_UNSEEN = "NOT (w.session_id = %(seen_session)s AND w.seq >= %(seen_from)s)"
_UNSEEN_OR_NONE = (
    f"(%(seen_session)s::uuid IS NULL OR {_UNSEEN}) AND w.session_id <> ALL (%(exclude_sessions)s::uuid[])"
)
_KEPT = "w.archived_at IS NULL"

_MEMORIES_WORDS = _BY_WORDS.format(table="memories", condition=_KEPT, key="memory_id", at="valid_from", weight=_WEIGHT)
MEMORIES_BY_WORDS = Statement(
    "recall.memories_by_words",
    f"""
    WITH {_MEMORIES_WORDS}
    SELECT memory_id, score / max(score) OVER () * least(max(share) OVER (), 1) AS score FROM by_words
    """,  # noqa: S608 (constants)
    writes=False,
)

# --- what a user has ---------------------------------------------------------------------


# Whether the user has so few rows that an exact search is faster than the index. An exact search reads all rows of the
# user. An index scan visits rows of all users until it has found enough rows of this user; such a visit takes about
# eight times as long. The two searches take the same time for a user with about 30 * sqrt(rows of the table) rows. The
# factor 25 leaves a margin.
def _few(table: str, indexed: str) -> str:
    return f"""
        known.{indexed} IS NULL
          OR NOT EXISTS (SELECT FROM {table} AS v WHERE v.user_id = %(user_id)s AND v.embedder_id = known.embedder_id
                    OFFSET (SELECT greatest(%(exact_rows)s, 25 * sqrt(greatest(reltuples, 0)))::bigint
                            FROM pg_class WHERE oid = '{table}'::regclass))
    """  # noqa: S608 (constants)


# Always one row. `embedder_id` is NULL if the embedder has made no vector. `few_messages` and `few_memories`: an exact
# search by vectors is right. ORDER BY makes the planner use the index on users and times, instead of reading the table
# until it finds a row.
AVAILABLE = Statement(
    "recall.available",
    f"""
    SELECT known.embedder_id, known.dimensions,
           {_few("message_vectors", "half_indexed_at")} AS few_messages,
           {_few("memory_vectors", "indexed_at")} AS few_memories,
           (SELECT true FROM memories WHERE user_id = %(user_id)s ORDER BY valid_from LIMIT 1) AS has_memories
    FROM (VALUES (true)) AS one (row)
    LEFT JOIN (SELECT embedder_id, dimensions, indexed_at, half_indexed_at FROM embedders
               WHERE name = %(name)s AND dimensions = %(dimensions)s) AS known ON true
    """,  # noqa: S608 (constants)
    writes=False,
)

# --- messages ----------------------------------------------------------------------------

_MESSAGES_WORDS = _BY_WORDS.format(
    table="message_words", condition=_UNSEEN_OR_NONE, key="session_id, seq", at="occurred_at", weight=_WEIGHT
)

# The vector of a message. The column `vector` has vectors that are not yet moved to `half`.
_HALF = "coalesce(w.half, w.vector::@vector.halfvec)"

# An exact search over the user's rows. All vectors have length 1, so the inner product is the cosine.
_MESSAGES_NEAR = f"""
    SELECT w.session_id, w.seq, {_HALF} OPERATOR(@vector.<#>) %(vector)s::@vector.halfvec AS distance
    FROM message_vectors AS w
    WHERE w.user_id = %(user_id)s AND w.embedder_id = %(embedder_id)s AND {_HALF} IS NOT NULL AND {_UNSEEN_OR_NONE}
    ORDER BY distance, w.session_id, w.seq LIMIT %(most)s
"""  # noqa: S608 (constants)

# The `k` best of the messages found by words, by vectors and by time, and of the neighbours of the best of them: for
# each, the nearest two messages before and after it that lie within `seq_reach`. `near` is the number of messages found
# by vectors.
#
# Word scores are divided by the highest one and multiplied by the highest share, since the best row may have only
# words that are barely related; and similarities are scaled from 0 (the lowest) to 1 (the highest). A
# message borrows a share of its best neighbour's score. The share decreases with the distance, and is smaller if the
# neighbour follows the message. One of the two is among the best, so that no message between them is unknown.
#
# `found` has some hundred rows, and the planner cannot estimate how many. Subqueries keep it from reading whole tables.
# `known` is materialized because it would be computed again for each use of `similarity`. `span` has subqueries because
# a plan for known arrays would seem so much cheaper that PostgreSQL would plan the statement again for each recall.
_MESSAGES = """
    WITH {words}, near AS MATERIALIZED (
        SELECT session_id, seq, row_number() OVER (ORDER BY distance, session_id, seq) AS position
        FROM ({near}) AS nearest
    ), span AS MATERIALIZED (
        SELECT span.*
        FROM unnest((SELECT %(starts)s::timestamptz[]), (SELECT %(ends)s::timestamptz[])) AS span (start, "end")
    ), timely AS MATERIALIZED (
        SELECT w.session_id, w.seq
        FROM span CROSS JOIN LATERAL (
            SELECT w.session_id, w.seq FROM message_words AS w
            WHERE w.user_id = %(user_id)s AND w.occurred_at >= span.start AND w.occurred_at < span."end" AND {unseen}
            ORDER BY w.occurred_at DESC, w.session_id, w.seq DESC LIMIT %(most_within)s) AS w
    ), best AS MATERIALIZED (
        (SELECT session_id, seq FROM by_words ORDER BY score DESC, session_id, seq LIMIT %(most_best)s)
        UNION
        SELECT session_id, seq FROM near WHERE position <= %(most_best)s
        UNION
        SELECT session_id, seq FROM timely
    ), found AS MATERIALIZED (
        SELECT session_id, seq, max(score) AS score, bool_or(best) AS best
        FROM (SELECT session_id, seq, score, false AS best FROM by_words
              UNION ALL
              SELECT session_id, seq, NULL, false FROM near
              UNION ALL
              SELECT session_id, seq, NULL, true FROM best
              UNION ALL
              SELECT best.session_id, beside.seq, NULL, false
              FROM best CROSS JOIN LATERAL (
                  (SELECT w.seq FROM message_words AS w
                   WHERE w.session_id = best.session_id AND w.seq < best.seq
                     AND w.seq >= best.seq - %(seq_reach)s AND w.user_id || '' = %(user_id)s AND {unseen}
                   ORDER BY w.seq DESC LIMIT 2)
                  UNION ALL
                  (SELECT w.seq FROM message_words AS w
                   WHERE w.session_id = best.session_id AND w.seq > best.seq
                     AND w.seq <= best.seq + %(seq_reach)s AND w.user_id || '' = %(user_id)s AND {unseen}
                   ORDER BY w.seq LIMIT 2)) AS beside) AS pooled
        GROUP BY session_id, seq
    ), known AS MATERIALIZED (
        SELECT session_id, seq, score, best,
               (SELECT -({half} OPERATOR(@vector.<#>) %(vector)s::@vector.halfvec) FROM message_vectors AS w
                WHERE w.session_id = found.session_id AND w.seq = found.seq AND w.embedder_id = %(embedder_id)s)
                 AS similarity,
               EXISTS (SELECT FROM span) AND EXISTS (
                   SELECT FROM span CROSS JOIN LATERAL (
                       SELECT w.occurred_at FROM message_words AS w
                       WHERE w.session_id = found.session_id AND w.seq = found.seq OFFSET 0) AS w
                   WHERE w.occurred_at >= span.start AND w.occurred_at < span."end") AS in_time
        FROM found
    ), own_scores AS (
        SELECT session_id, seq, best, in_time,
               %(text_weight)s::double precision
                 * coalesce(score / max(score) OVER () * (SELECT least(max(share), 1) FROM by_words), 0)
                 + %(vector_weight)s::double precision
                   * coalesce((similarity - min(similarity) OVER ())
                              / nullif(max(similarity) OVER () - min(similarity) OVER (), 0), 0) AS score
        FROM known
    ), lent AS (
        SELECT session_id, seq, score AS own,
               score + %(neighbours_weight)s::double precision * greatest(
                   0,
                   CASE WHEN (best OR lag(best) OVER session) AND seq - lag(seq) OVER session <= %(seq_reach)s
                        THEN lag(score) OVER session END,
                   CASE WHEN (best OR lag(best, 2) OVER session) AND seq - lag(seq, 2) OVER session <= %(seq_reach)s
                        THEN lag(score, 2) OVER session / 2 END,
                   CASE WHEN (best OR lead(best) OVER session) AND lead(seq) OVER session - seq <= %(seq_reach)s
                        THEN lead(score) OVER session * %(preceding)s::double precision END,
                   CASE WHEN (best OR lead(best, 2) OVER session) AND lead(seq, 2) OVER session - seq <= %(seq_reach)s
                        THEN lead(score, 2) OVER session * %(preceding)s::double precision / 2 END)
               + CASE WHEN in_time THEN %(time_weight)s::double precision ELSE 0 END AS score
        FROM own_scores WINDOW session AS (PARTITION BY session_id ORDER BY seq)
    ), chosen AS MATERIALIZED (
        SELECT * FROM lent ORDER BY score DESC, session_id, seq LIMIT %(k)s
    )
    SELECT m.*, chosen.session_id, chosen.seq, chosen.own, chosen.score - chosen.own AS borrowed,
           (SELECT count(*) FROM near) AS near
    FROM chosen CROSS JOIN LATERAL (
        SELECT m.role, m.author, left(m.content, %(read_chars)s) AS content, m.channel, m.message_id, w.occurred_at
        FROM messages AS m JOIN message_words AS w USING (session_id, seq)
        WHERE m.session_id = chosen.session_id AND m.seq = chosen.seq OFFSET 0) AS m
    ORDER BY chosen.score DESC, chosen.session_id, chosen.seq
"""

FIND_MESSAGES = Statement(
    "recall.find_messages",
    _MESSAGES.format(words=_MESSAGES_WORDS, near=_MESSAGES_NEAR, unseen=_UNSEEN_OR_NONE, half=_HALF),
    writes=False,
)

# The HNSW index returns the rows of all users, nearest first, until enough rows satisfy the conditions. This requires
# `hnsw.iterative_scan`, which the connection turns on. The rows are sorted again, because the scan may return rows
# slightly out of order.
#
# CASE keeps the planner from using the index on users. It also makes the planner assume that half of all rows match.
# With a better estimate, the planner would read and sort the whole table. The limit is a constant, because with a
# parameter, PostgreSQL would plan the statement again for each recall, which takes as long as the search.
_MESSAGES_NEAR_BY_INDEX = """
    SELECT session_id, seq, distance
    FROM (
        SELECT w.session_id, w.seq, {half} OPERATOR(@vector.<#>) %(vector)s::@vector.halfvec AS distance
        FROM message_vectors AS w
        WHERE w.embedder_id = {embedder_id} AND {half} IS NOT NULL
          AND CASE WHEN w.user_id = %(user_id)s THEN {condition} ELSE false END
        ORDER BY {half}::@vector.halfvec({dimensions})
                 OPERATOR(@vector.<=>) %(vector)s::@vector.halfvec({dimensions})
        LIMIT {most}
    ) AS nearest
    ORDER BY distance, session_id, seq
"""


# The whole contents of messages of which `FIND_MESSAGES` returned the beginning.
CONTENTS = Statement(
    "recall.contents",
    """
    SELECT m.session_id, m.seq, m.content
    FROM unnest(%(session_ids)s::uuid[], %(seqs)s::bigint[]) AS given (session_id, seq)
    JOIN message_words AS w USING (session_id, seq) JOIN messages AS m USING (session_id, seq)
    WHERE w.user_id || '' = %(user_id)s
    """,
    writes=False,
)


@functools.cache
def find_messages_by_index(embedder_id: int, dimensions: int) -> Statement:
    """A variant of `FIND_MESSAGES` that uses the embedder's HNSW index, for a user with many messages."""
    near = _MESSAGES_NEAR_BY_INDEX.format(
        half=_HALF,
        condition=_UNSEEN_OR_NONE,
        embedder_id=embedder_id,
        dimensions=dimensions,
        most=CANDIDATES,
    )
    return Statement(
        f"recall.find_messages_{embedder_id}",
        _MESSAGES.format(words=_MESSAGES_WORDS, near=near, unseen=_UNSEEN_OR_NONE, half=_HALF),
        writes=False,
    )


# --- memories by vectors and by time -----------------------------------------------------

# An exact search over the user's rows. It sorts before it looks up `archived_at`, so that it looks up as few memories
# as possible.
MEMORIES_NEAR = Statement(
    "recall.memories_near",
    """
    SELECT near.memory_id, near.similarity
    FROM (SELECT v.memory_id, 1 - (v.vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector) AS similarity
          FROM memory_vectors AS v
          WHERE v.user_id = %(user_id)s AND v.embedder_id = %(embedder_id)s AND v.vector IS NOT NULL
          ORDER BY similarity DESC, v.memory_id OFFSET 0) AS near
    WHERE (SELECT w.archived_at IS NULL FROM memories AS w WHERE w.memory_id = near.memory_id)
    LIMIT %(most)s
    """,
    writes=False,
)


@functools.cache
def memories_near_by_index(embedder_id: int, dimensions: int) -> Statement:
    """A variant of `MEMORIES_NEAR` that uses the embedder's HNSW index, for a user with many memories.

    The index stores vectors in half precision. The query therefore fetches a third more rows than needed, and sorts
    them again by their full vectors. The parameter's first cast must be `::vector`. With `::halfvec` first, both
    distances would be computed in half precision.
    """
    return Statement(
        f"recall.memories_near_{embedder_id}",
        f"""
        WITH near AS MATERIALIZED (
            SELECT v.memory_id, v.vector FROM memory_vectors AS v
            WHERE v.embedder_id = {embedder_id} AND v.vector IS NOT NULL
              AND CASE WHEN v.user_id = %(user_id)s
                       THEN (SELECT m.archived_at IS NULL FROM memories AS m WHERE m.memory_id = v.memory_id)
                       ELSE false END
            ORDER BY v.vector::@vector.halfvec({dimensions})
                     OPERATOR(@vector.<=>) %(vector)s::@vector.vector::@vector.halfvec({dimensions})
            LIMIT %(most)s * 4 / 3
        )
        SELECT memory_id, 1 - (vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector) AS similarity
        FROM near
        ORDER BY similarity DESC, memory_id LIMIT %(most)s
        """,  # noqa: S608 (constants)
        writes=False,
    )


MEMORIES_WITHIN = Statement(
    "recall.memories_within",
    f"""
    SELECT w.memory_id FROM memories AS w
    WHERE w.user_id = %(user_id)s AND w.valid_from >= %(start)s AND w.valid_from < %(end)s AND {_KEPT}
    ORDER BY w.valid_from DESC, w.memory_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

# --- the rows that were found ------------------------------------------------------------

MEMORIES = Statement(
    "recall.memories",
    """
    SELECT w.memory_id, w.kind, w.content, w.valid_from, w.valid_to, w.value,
           1 - (v.vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector) AS similarity,
           ARRAY(SELECT coalesce(m.message_id, m.session_id || ':' || m.seq)
                 FROM memory_sources AS s JOIN messages AS m USING (session_id, seq)
                 WHERE s.memory_id = w.memory_id ORDER BY m.created_at, m.session_id, m.seq) AS message_ids
    FROM memories AS w
    LEFT JOIN memory_vectors AS v ON v.memory_id = w.memory_id AND v.embedder_id = %(embedder_id)s
    WHERE w.memory_id = ANY (%(memory_ids)s::uuid[]) AND w.user_id = %(user_id)s
    """,
    writes=False,
)

# Records one access to each memory. Locks the memories in the order of their ids, as all statements do, to avoid
# deadlocks.
ACCESSED = Statement(
    "recall.accessed",
    """
    WITH read AS (
        SELECT memory_id FROM memories
        WHERE memory_id = ANY (%(memory_ids)s::uuid[]) AND user_id = %(user_id)s
        ORDER BY memory_id FOR NO KEY UPDATE
    ), counted AS MATERIALIZED (
        UPDATE memories AS m SET access_count = access_count + 1, last_accessed_at = perdure_now()
        FROM read WHERE m.memory_id = read.memory_id
    )
    INSERT INTO memory_accesses (memory_id, accessed_at, access_id, user_id)
    SELECT memory_id, perdure_now(), %(access_id)s, %(user_id)s FROM read
    """,
)
