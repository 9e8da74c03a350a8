"""The statements of recall and of vectors. Each that reads is bounded by one user's rows, in the statement itself."""

from __future__ import annotations

import functools

from perdure.database.engine import Statement

# --- by words ----------------------------------------------------------------------------

# Inverse document frequencies of the user's own rows, and BM25's length normalisation (Robertson
# and Zaragoza, 2009) with k1 = 1.2, b = 0.5 and every term counted once. Rows are looked up by the
# rarest terms, as far as these are in no more than `most_rows`; what is found is scored by all. A term is
# quoted as a text search query wants it by way of a vector of it. `user_id || ''`: the words hold the owner,
# and to look up all of a user's rows besides gains nothing.
_BY_WORDS = """
    WITH asked AS MATERIALIZED (
        SELECT term FROM unnest(tsvector_to_array(perdure_words(%(query)s))) AS term
        ORDER BY length(term) DESC, term LIMIT %(most_terms)s
    ), owner AS MATERIALIZED (
        SELECT array_to_tsvector(ARRAY[perdure_owner(%(user_id)s)])::text AS quoted
    ), counted AS MATERIALIZED (
        SELECT array_to_tsvector(ARRAY[term])::text AS quoted,
               (SELECT count(*) FROM (
                    SELECT FROM {table} AS w
                    WHERE w.words @@ (owner.quoted || ' & ' || array_to_tsvector(ARRAY[term])::text)::tsquery
                    LIMIT %(most_rows)s) AS found) AS rows
        FROM asked, owner
    ), own AS MATERIALIZED (
        SELECT count(*) AS rows
        FROM (SELECT FROM {table} AS w WHERE w.user_id = %(user_id)s LIMIT %(most_rows)s) AS mine
    ), weighed AS MATERIALIZED (
        SELECT quoted, quoted::tsquery AS query,
               ln(1 + (greatest(own.rows - counted.rows, 0) + 0.5) / (counted.rows + 0.5))::double precision AS idf,
               sum(counted.rows) OVER (ORDER BY counted.rows, quoted) AS up_to,
               row_number() OVER (ORDER BY counted.rows, quoted) AS position
        FROM counted, own WHERE counted.rows > 0
    ), wanted AS (
        SELECT (owner.quoted || ' & (' || string_agg(weighed.quoted, ' | ') || ')')::tsquery AS query
        FROM weighed, owner WHERE up_to <= %(most_rows)s OR position = 1
        GROUP BY owner.quoted
    ), found AS (
        SELECT w.*, length(w.words) AS words_in_it, avg(length(w.words)) OVER ()::double precision AS words_in_any
        FROM (SELECT * FROM {table} AS w
              WHERE w.words @@ (SELECT query FROM wanted) AND w.user_id || '' = %(user_id)s
              LIMIT %(most_rows)s) AS w
        WHERE {condition}
    )
    SELECT {columns},
           (SELECT sum(idf) FROM weighed WHERE w.words @@ weighed.query)
             * (2.2 / (1.6 + 0.6 * w.words_in_it / w.words_in_any))::double precision AS score
    FROM found AS w
    ORDER BY score DESC, {columns} LIMIT %(most)s
"""

# What the prompt holds already is not recalled into it.
_UNSEEN = "NOT (w.session_id = %(seen_session)s AND w.seq >= %(seen_from)s)"
_UNSEEN_OR_NONE = f"(%(seen_session)s::uuid IS NULL OR {_UNSEEN})"
_KEPT = "w.archived_at IS NULL"

MESSAGES_BY_WORDS = Statement(
    "recall.messages_by_words",
    _BY_WORDS.format(table="message_words", condition=_UNSEEN_OR_NONE, columns="w.session_id, w.seq"),
    writes=False,
)

MEMORIES_BY_WORDS = Statement(
    "recall.memories_by_words",
    _BY_WORDS.format(table="memories", condition=_KEPT, columns="w.memory_id"),
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


def _few(table: str) -> Statement:
    return Statement(
        f"recall.few_{table}",
        f"""
        SELECT count(*) <= %(exact_rows)s AS few
        FROM (SELECT FROM {table} WHERE user_id = %(user_id)s AND embedder_id = %(embedder_id)s
              LIMIT %(exact_rows)s + 1) AS own
        """,  # noqa: S608 (constants)
        writes=False,
    )


FEW_MESSAGES = _few("message_vectors")
FEW_MEMORIES = _few("memory_vectors")

# Exact: over the user's own rows.
MESSAGES_NEAR = Statement(
    "recall.messages_near",
    f"""
    SELECT w.session_id, w.seq, 1 - (w.vector <=> %(vector)s::vector) AS similarity
    FROM message_vectors AS w
    WHERE w.user_id = %(user_id)s AND w.embedder_id = %(embedder_id)s AND w.vector IS NOT NULL AND {_UNSEEN_OR_NONE}
    ORDER BY similarity DESC, w.session_id, w.seq LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

# Nearest first, and of these the first that are not archived: the others are not looked up.
MEMORIES_NEAR = Statement(
    "recall.memories_near",
    """
    SELECT near.memory_id, near.similarity
    FROM (SELECT v.memory_id, 1 - (v.vector <=> %(vector)s::vector) AS similarity
          FROM memory_vectors AS v
          WHERE v.user_id = %(user_id)s AND v.embedder_id = %(embedder_id)s AND v.vector IS NOT NULL
          ORDER BY similarity DESC, v.memory_id OFFSET 0) AS near
    WHERE (SELECT w.archived_at IS NULL FROM memories AS w WHERE w.memory_id = near.memory_id)
    LIMIT %(most)s
    """,
    writes=False,
)

# By the index: it gives rows of anybody in order, nearest first, until enough are the user's (the
# connection has `hnsw.iterative_scan` on). `user_id || ''` again keeps off the index on users: a plan that
# is made once for all users would look up and sort all of a user's rows, however many. The
# index holds half precision; what it finds is ordered again by the vectors themselves.
_NEAR_BY_INDEX = """
    WITH near AS MATERIALIZED (
        SELECT {columns}, w.vector FROM {table} AS w
        WHERE w.embedder_id = {embedder_id} AND w.vector IS NOT NULL AND w.user_id || '' = %(user_id)s
        ORDER BY w.vector::halfvec({dimensions}) <=> %(vector)s::halfvec({dimensions})
        LIMIT %(most)s * 2
    )
    SELECT {columns}, 1 - (near.vector <=> %(vector)s::vector) AS similarity
    FROM near JOIN {rows} AS w USING ({key})
    WHERE {condition}
    ORDER BY similarity DESC, {columns} LIMIT %(most)s
"""


@functools.cache
def messages_near_by_index(embedder_id: int, dimensions: int) -> Statement:
    """The same for a user of many messages, by the index of that embedder."""
    return Statement(
        f"recall.messages_near_{embedder_id}",
        _NEAR_BY_INDEX.format(
            table="message_vectors",
            rows="message_words",
            key="session_id, seq",
            columns="w.session_id, w.seq",
            condition=_UNSEEN_OR_NONE,
            embedder_id=embedder_id,
            dimensions=dimensions,
        ),
        writes=False,
    )


@functools.cache
def memories_near_by_index(embedder_id: int, dimensions: int) -> Statement:
    """The same for a user of many memories, by the index of that embedder."""
    return Statement(
        f"recall.memories_near_{embedder_id}",
        _NEAR_BY_INDEX.format(
            table="memory_vectors",
            rows="memories",
            key="memory_id",
            columns="w.memory_id",
            condition=_KEPT,
            embedder_id=embedder_id,
            dimensions=dimensions,
        ),
        writes=False,
    )


# --- by time, and what stands beside -----------------------------------------------------

MESSAGES_WITHIN = Statement(
    "recall.messages_within",
    f"""
    SELECT w.session_id, w.seq FROM message_words AS w
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

# The messages around those that were found, and how near they are themselves.
AROUND = Statement(
    "recall.around",
    f"""
    SELECT DISTINCT w.session_id, w.seq, w.occurred_at, 1 - (v.vector <=> %(vector)s::vector) AS similarity
    FROM unnest(%(session_ids)s::uuid[], %(seqs)s::bigint[]) AS found (session_id, seq)
    JOIN message_words AS w
      ON w.session_id = found.session_id AND w.seq BETWEEN found.seq - %(reach)s AND found.seq + %(reach)s
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
    FROM unnest(%(session_ids)s::uuid[], %(seqs)s::bigint[]) AS found (session_id, seq)
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
           1 - (v.vector <=> %(vector)s::vector) AS similarity,
           ARRAY(SELECT coalesce(m.message_id, m.session_id || ':' || m.seq)
                 FROM memory_sources AS s JOIN messages AS m USING (session_id, seq)
                 WHERE s.memory_id = w.memory_id ORDER BY m.created_at, m.session_id, m.seq) AS message_ids
    FROM memories AS w
    LEFT JOIN memory_vectors AS v ON v.memory_id = w.memory_id AND v.embedder_id = %(embedder_id)s
    WHERE w.memory_id = ANY (%(memory_ids)s::uuid[]) AND w.user_id = %(user_id)s
    """,
    writes=False,
)

# In the order of their ids, as everybody locks them.
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
