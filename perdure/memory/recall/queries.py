"""The SQL statements of recall. Every statement on messages or memories is limited to the rows of one user."""

from __future__ import annotations

import functools

from perdure.database.engine import Statement

# --- by words ----------------------------------------------------------------------------

# The score is BM25 (Robertson and Zaragoza, 2009) with k1 = 1.2 and b = 0.5. A term counts once per row, even if the
# row repeats it. A term's inverse document frequency is computed over the user's newest rows, including the rows that
# `condition` excludes.
#
# For a user with at most `most_rows` rows, the search is exact and complete. For other users, the index also finds
# older rows, by the terms that are uncommon among the newest rows. The index finds rows with two of these terms, then
# rows with one, up to `most_found` rows. Rarer terms come first. The cost therefore does not grow with the number of
# the user's rows, nor with the number of rows that contain a common word.
#
# Session ids are returned as text, because creating, hashing and comparing hundreds of `UUID` objects would take longer
# than the search.
#
# Converting a term to a `tsvector` and back to text quotes the term for `tsquery`. With `strip`, a long row is
# decompressed once instead of once per term. `user_id || ''` keeps the planner from using the index on `user_id`. The
# index on `words` suffices, because each row's `words` also contains the row's user (`perdure_owner`).
_BY_WORDS = """
    WITH asked AS MATERIALIZED (
        SELECT row_number() OVER (ORDER BY length(term) DESC, term)::integer AS number,
               term, quoted, quoted::tsquery AS query
        FROM unnest(tsvector_to_array(perdure_words(%(query)s))) AS term
        CROSS JOIN LATERAL (SELECT array_to_tsvector(ARRAY[term])::text AS quoted OFFSET 0) AS of_term
        ORDER BY length(term) DESC, term LIMIT %(most_terms)s
    ), newest AS MATERIALIZED (
        SELECT {key}, {condition} AS fits,
               CASE WHEN w.words @@ (SELECT string_agg(quoted, ' | ')::tsquery FROM asked)
                    THEN strip(w.words) END AS words
        FROM {table} AS w WHERE w.user_id = %(user_id)s
        ORDER BY w.{at} DESC LIMIT %(most_rows)s + 1
    ), own AS MATERIALIZED (
        SELECT count(*) AS rows, count(*) > %(most_rows)s AS many FROM newest
    ), held AS MATERIALIZED (
        SELECT {key}, n.fits, length(n.words) AS length, asked.number
        FROM newest AS n JOIN asked ON n.words @@ asked.query
        WHERE n.words IS NOT NULL
    ), counted AS (
        SELECT number, count(*) AS rows FROM held GROUP BY number
    ), weighed AS MATERIALIZED (
        SELECT number, quoted, asked.query,
               coalesce(counted.rows, 0) <= %(common)s::double precision * own.rows AS uncommon,
               ln(1 + (own.rows - coalesce(counted.rows, 0) + 0.5) / (coalesce(counted.rows, 0) + 0.5))
                 ::double precision AS idf,
               row_number() OVER (ORDER BY coalesce(counted.rows, 0), length(asked.term) DESC, quoted) AS position
        FROM own, asked LEFT JOIN counted USING (number)
    ), step AS MATERIALIZED (
        SELECT terms, first.position,
               (array_to_tsvector(ARRAY[perdure_owner(%(user_id)s)])::text || ' & ' || first.quoted
                  || CASE terms WHEN 2 THEN ' & (' || string_agg(other.quoted, ' | ')
                                               FILTER (WHERE other.position > first.position) || ')'
                                 ELSE coalesce(' & !(' || string_agg(other.quoted, ' | ') || ')', '') END)::tsquery
                 AS query
        FROM own CROSS JOIN generate_series(1, 2) AS terms CROSS JOIN weighed AS first
        LEFT JOIN weighed AS other ON other.uncommon AND other.position <> first.position
        WHERE own.many AND first.uncommon
        GROUP BY terms, first.position, first.quoted
        ORDER BY terms DESC, first.position
    ), older AS MATERIALIZED (
        SELECT {key}, w.words
        FROM step CROSS JOIN LATERAL (
            SELECT {key}, strip(w.words) AS words FROM {table} AS w
            WHERE w.words @@ step.query AND w.user_id || '' = %(user_id)s AND {condition}
            LIMIT %(most_found)s) AS w
        LIMIT %(most_found)s
    ), scored AS (
        SELECT {key}, length, sum(weighed.idf) AS idf, avg(length) OVER ()::double precision AS mean_length
        FROM (SELECT {key}, length, number FROM held WHERE fits
              UNION ALL
              SELECT DISTINCT {key}, length(w.words), weighed.number
              FROM older AS w JOIN weighed ON w.words @@ weighed.query
              WHERE ({key}) NOT IN (SELECT {key} FROM newest)) AS found
        JOIN weighed USING (number)
        GROUP BY {key}, length
    )
    SELECT {shown}, idf * (2.2 / (1.6 + 0.6 * length / mean_length))::double precision AS score
    FROM scored
    ORDER BY score DESC, {key} LIMIT %(most)s
"""

# Excludes the messages that the prompt contains, and the sessions in `exclude_sessions`.
_UNSEEN = "NOT (w.session_id = %(seen_session)s AND w.seq >= %(seen_from)s)"
_UNSEEN_OR_NONE = (
    f"(%(seen_session)s::uuid IS NULL OR {_UNSEEN}) AND w.session_id <> ALL (%(exclude_sessions)s::uuid[])"
)
_KEPT = "w.archived_at IS NULL"

MESSAGES_BY_WORDS = Statement(
    "recall.messages_by_words",
    _BY_WORDS.format(
        table="message_words",
        condition=_UNSEEN_OR_NONE,
        key="session_id, seq",
        shown="session_id::text, seq",
        at="occurred_at",
    ),
    writes=False,
)

MEMORIES_BY_WORDS = Statement(
    "recall.memories_by_words",
    _BY_WORDS.format(table="memories", condition=_KEPT, key="memory_id", shown="memory_id", at="valid_from"),
    writes=False,
)

# --- by vectors --------------------------------------------------------------------------

EMBEDDER = Statement(
    "recall.embedder",
    """
    SELECT embedder_id, indexed_at IS NOT NULL AS indexed FROM embedders
    WHERE name = %(name)s AND dimensions = %(dimensions)s
    """,
    writes=False,
)


# Whether the user has so few rows that an exact search is faster than the index. An exact search reads all rows of the
# user; a row takes 2 microseconds (measured). An index scan visits rows of all users until it has found enough rows of
# this user; a row takes 15 microseconds. The two searches take the same time for a user with about
# 30 * sqrt(rows of the table) rows. The factor 25 leaves a margin.
def _few(table: str) -> Statement:
    return Statement(
        f"recall.few_{table}",
        f"""
        WITH bound AS MATERIALIZED (
            SELECT greatest(%(exact_rows)s, 25 * sqrt(greatest(reltuples, 0)))::bigint AS rows
            FROM pg_class WHERE oid = '{table}'::regclass
        )
        SELECT NOT EXISTS (SELECT FROM {table} WHERE user_id = %(user_id)s AND embedder_id = %(embedder_id)s
                           OFFSET (SELECT rows FROM bound)) AS few
        """,  # noqa: S608 (constants)
        writes=False,
    )


FEW_MESSAGES = _few("message_vectors")
FEW_MEMORIES = _few("memory_vectors")

# An exact search over the user's rows.
MESSAGES_NEAR = Statement(
    "recall.messages_near",
    f"""
    SELECT w.session_id::text, w.seq, 1 - (w.vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector) AS similarity
    FROM message_vectors AS w
    WHERE w.user_id = %(user_id)s AND w.embedder_id = %(embedder_id)s AND w.vector IS NOT NULL AND {_UNSEEN_OR_NONE}
    ORDER BY similarity DESC, w.session_id, w.seq LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

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

# The HNSW index returns the rows of all users, nearest first, until enough rows satisfy the conditions. This requires
# `hnsw.iterative_scan`, which the connection turns on.
#
# CASE keeps the planner from using the index on users. It also makes the planner assume that half of all rows match.
# With a better estimate, the planner would read and sort the whole table.
#
# The index stores vectors in half precision. The query therefore fetches a third more rows than needed, and sorts them
# again by their full vectors.
#
# The parameter's first cast must be `::vector`. With `::halfvec` first, both distances would be computed in half
# precision.
_NEAR_BY_INDEX = """
    WITH near AS MATERIALIZED (
        SELECT {columns}, w.vector FROM {table} AS w
        WHERE w.embedder_id = {embedder_id} AND w.vector IS NOT NULL
          AND CASE WHEN w.user_id = %(user_id)s THEN {condition} ELSE false END
        ORDER BY w.vector::@vector.halfvec({dimensions})
                 OPERATOR(@vector.<=>) %(vector)s::@vector.vector::@vector.halfvec({dimensions})
        LIMIT %(most)s * 4 / 3
    )
    SELECT {shown}, 1 - (w.vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector) AS similarity
    FROM near AS w
    ORDER BY similarity DESC, {columns} LIMIT %(most)s
"""


@functools.cache
def messages_near_by_index(embedder_id: int, dimensions: int) -> Statement:
    """A variant of `MESSAGES_NEAR` that uses the embedder's HNSW index, for a user with many messages."""
    return Statement(
        f"recall.messages_near_{embedder_id}",
        _NEAR_BY_INDEX.format(
            table="message_vectors",
            columns="w.session_id, w.seq",
            shown="w.session_id::text, w.seq",
            condition=_UNSEEN_OR_NONE,
            embedder_id=embedder_id,
            dimensions=dimensions,
        ),
        writes=False,
    )


@functools.cache
def memories_near_by_index(embedder_id: int, dimensions: int) -> Statement:
    """A variant of `MEMORIES_NEAR` that uses the embedder's HNSW index, for a user with many memories."""
    return Statement(
        f"recall.memories_near_{embedder_id}",
        _NEAR_BY_INDEX.format(
            table="memory_vectors",
            columns="w.memory_id",
            shown="w.memory_id",
            condition="(SELECT m.archived_at IS NULL FROM memories AS m WHERE m.memory_id = w.memory_id)",
            embedder_id=embedder_id,
            dimensions=dimensions,
        ),
        writes=False,
    )


# --- by time, and neighbours -------------------------------------------------------------

MESSAGES_WITHIN = Statement(
    "recall.messages_within",
    f"""
    SELECT w.session_id::text, w.seq FROM message_words AS w
    WHERE w.user_id = %(user_id)s AND w.occurred_at >= %(start)s AND w.occurred_at < %(end)s AND {_UNSEEN_OR_NONE}
    ORDER BY w.occurred_at DESC, w.session_id, w.seq DESC LIMIT %(most)s
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

# The messages within the given ranges, which do not overlap. Each message has its similarity and the number of its
# range (`stretch`).
AROUND = Statement(
    "recall.around",
    f"""
    SELECT w.session_id::text, w.seq, found.stretch, w.occurred_at,
           1 - (v.vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector) AS similarity
    FROM unnest(%(session_ids)s::text[]::uuid[], %(firsts)s::bigint[], %(lasts)s::bigint[])
      WITH ORDINALITY AS found (session_id, first, last, stretch)
    JOIN message_words AS w ON w.session_id = found.session_id AND w.seq BETWEEN found.first AND found.last
    LEFT JOIN message_vectors AS v
      ON v.session_id = w.session_id AND v.seq = w.seq AND v.embedder_id = %(embedder_id)s
    WHERE w.user_id = %(user_id)s AND {_UNSEEN_OR_NONE}
    """,  # noqa: S608 (constants)
    writes=False,
)

MESSAGES = Statement(
    "recall.messages",
    """
    SELECT m.session_id, m.seq, m.role, m.author, m.content, m.channel, m.message_id, w.occurred_at
    FROM unnest(%(session_ids)s::text[]::uuid[], %(seqs)s::bigint[]) AS found (session_id, seq)
    JOIN messages AS m USING (session_id, seq)
    JOIN message_words AS w USING (session_id, seq)
    WHERE w.user_id = %(user_id)s
    """,
    writes=False,
)

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
