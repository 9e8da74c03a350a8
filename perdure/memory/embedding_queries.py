"""The SQL statements of `perdure.memory.embedding`."""

from __future__ import annotations

from perdure.database.engine import Statement

REGISTER = Statement(
    "embedding.register",
    """
    WITH known AS (
        SELECT embedder_id, indexed_at IS NOT NULL AND half_indexed_at IS NOT NULL AS indexed FROM embedders
        WHERE name = %(name)s AND dimensions = %(dimensions)s
    ), new AS (
        INSERT INTO embedders (name, dimensions, created_at)
        SELECT %(name)s, %(dimensions)s, perdure_now() WHERE NOT EXISTS (SELECT FROM known)
        ON CONFLICT (name, dimensions) DO NOTHING
        RETURNING embedder_id, false AS indexed
    )
    SELECT * FROM known UNION ALL SELECT * FROM new
    """,
)

# Whether retention deletes the vector of a message of the time `at` (`retention.VECTORS`). 0 days: it never does.
_EXPIRED = """
    (%(vectors_days)s::int > 0 AND {at} < perdure_now() - make_interval(days => %(vectors_days)s::int))
""".strip()

# The text of each row in the CTE `taken`. It is NULL if the message or memory was deleted, or if retention deletes the
# message's vector.
_TEXTS = f"""
    SELECT t.kind, t.id, t.seq, t.attempts,
           CASE WHEN {_EXPIRED.format(at="m.created_at")} THEN NULL
                WHEN t.kind = 'memory' THEN
                    (SELECT left(k.content, %(most_chars)s) FROM memories AS k WHERE k.memory_id = t.id)
                ELSE left(m.content, %(most_chars)s) END AS content,
           m.author, m.created_at
    FROM taken AS t
    LEFT JOIN LATERAL (
        SELECT content, author, created_at FROM messages
        WHERE t.kind = 'message' AND session_id = t.id AND seq = t.seq LIMIT 1) AS m ON true
    ORDER BY t.kind, t.id, t.seq
"""  # noqa: S608 (constants)

# Claims due rows by moving their `due_at` to the end of the lease. If the claiming process crashes, another process
# claims the rows when the lease ends. If a `due_at` is further ahead than the longest pause, the clock of the database
# server was wrong when the `due_at` was written. Such a row counts as due. The plan is for all parameters, and expects
# that a limit which is one leaves a tenth of the table: it would read all that waits. So rows are addressed by their
# places.
CLAIM = Statement(
    "embedding.take",
    f"""
    WITH due AS (
        SELECT ctid FROM unembedded WHERE due_at <= perdure_now()
        ORDER BY due_at LIMIT %(most)s
        FOR UPDATE SKIP LOCKED
    ), misdated AS (
        SELECT ctid FROM unembedded WHERE due_at > perdure_now() + make_interval(secs => %(furthest_s)s)
        ORDER BY due_at LIMIT %(most)s - (SELECT count(*) FROM due)
        FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE unembedded AS u
        SET due_at = perdure_now() + make_interval(secs => %(lease_s)s), attempts = u.attempts + 1
        WHERE u.ctid = ANY (ARRAY(SELECT ctid FROM due UNION ALL SELECT ctid FROM misdated))
        RETURNING u.kind, u.id, u.seq, u.attempts
    )
    {_TEXTS}
    """,  # noqa: S608 (constants)
)

# The messages of the given sessions that have no vector, including messages that another process has claimed.
# Embedding a text twice does no harm.
MISSING_OF_SESSIONS = Statement(
    "embedding.lacking",
    f"""
    WITH taken AS (
        SELECT kind, id, seq, attempts FROM unembedded
        WHERE kind = 'message' AND id = ANY (%(session_ids)s::uuid[])
        ORDER BY kind, id, seq LIMIT %(most)s
    )
    {_TEXTS}
    """,  # noqa: S608 (constants)
    writes=False,
)

# Locks the messages and memories, then writes their vectors. A concurrent erasure therefore waits for the vectors and
# deletes them too.
STORE = Statement(
    "embedding.store",
    f"""
    WITH made AS (
        SELECT * FROM unnest(%(kinds)s::text[], %(ids)s::uuid[], %(seqs)s::bigint[], %(vectors)s::text[])
            AS made (kind, id, seq, vector)
    ), said AS MATERIALIZED (
        SELECT w.session_id, w.seq, w.user_id, made.vector::@vector.halfvec AS half
        FROM made JOIN message_words AS w ON made.kind = 'message' AND w.session_id = made.id AND w.seq = made.seq
        WHERE NOT {_EXPIRED.format(at="w.occurred_at")}
        FOR KEY SHARE OF w
    ), known AS MATERIALIZED (
        SELECT m.memory_id, m.user_id, made.vector::@vector.vector AS vector
        FROM made JOIN memories AS m ON made.kind = 'memory' AND m.memory_id = made.id
        FOR KEY SHARE OF m
    ), of_messages AS (
        INSERT INTO message_vectors (session_id, seq, embedder_id, user_id, half)
        SELECT session_id, seq, %(embedder_id)s, user_id, half FROM said
        ON CONFLICT DO NOTHING
        RETURNING 1
    ), of_memories AS (
        INSERT INTO memory_vectors (memory_id, embedder_id, user_id, vector)
        SELECT memory_id, %(embedder_id)s, user_id, vector FROM known
        ON CONFLICT DO NOTHING
        RETURNING 1
    ), done AS (
        DELETE FROM unembedded AS u USING made WHERE (u.kind, u.id, u.seq) = (made.kind, made.id, made.seq)
    )
    SELECT (SELECT count(*) FROM of_messages) + (SELECT count(*) FROM of_memories) AS stored
    """,  # noqa: S608 (constants)
)

# Postpones rows after a failure of the embedder; the pause doubles with each attempt.
POSTPONE = Statement(
    "embedding.postpone",
    """
    UPDATE unembedded AS u
    SET due_at = perdure_now() + make_interval(secs => %(pause_s)s * 2 ^ least(u.attempts - 1, %(doublings)s))
    FROM unnest(%(kinds)s::text[], %(ids)s::uuid[], %(seqs)s::bigint[]) AS taken (kind, id, seq)
    WHERE (u.kind, u.id, u.seq) = (taken.kind, taken.id, taken.seq)
    """,
)

# --- the scan for older rows that lack a vector of the embedder --------------------------

_WALK_IS_DUE = "(e.walked_at IS NULL OR e.walked_at <= perdure_now() - make_interval(secs => %(every_s)s))"

PLACE = Statement(
    "embedding.place",
    f"""
    SELECT e.walked_kind, e.walked_id, e.walked_seq FROM embedders AS e
    WHERE e.embedder_id = %(embedder_id)s AND {_WALK_IS_DUE}
    """,  # noqa: S608 (constants)
    writes=False,
)

# Reads the next page of messages or memories. Adds each row that lacks a vector of this embedder to `unembedded`, and
# saves the end of the page as the new position. If two processes read the same page, only one of them writes. After an
# empty page of messages, the scan continues with the memories. An empty page of memories ends the scan. Messages whose
# vectors retention deletes are left out.
#
# The scan of the messages also moves vectors of full precision, which a former release wrote, to `half`.
_WALK = """
    WITH place AS (
        SELECT e.embedder_id FROM embedders AS e
        WHERE e.embedder_id = %(embedder_id)s AND {at_rest}
          AND (e.walked_kind, e.walked_id, e.walked_seq)
              IS NOT DISTINCT FROM (%(kind_before)s::text, %(id_before)s::uuid, %(seq_before)s::bigint)
        FOR NO KEY UPDATE SKIP LOCKED
    ), page AS (
        {page}
    ), noted AS (
        INSERT INTO unembedded (kind, id, seq, user_id, due_at)
        SELECT '{kind}', page.id, page.seq, page.user_id, perdure_now()
        FROM place, page
        WHERE NOT EXISTS ({vector}){unless}
        ON CONFLICT DO NOTHING
    ){also}
    UPDATE embedders AS e
    SET walked_kind = CASE WHEN reached.id IS NULL THEN {kind_after} ELSE '{kind}' END,
        walked_id = reached.id, walked_seq = reached.seq,
        walked_at = CASE WHEN reached.id IS NULL AND {kind_after} IS NULL THEN perdure_now() ELSE e.walked_at END
    FROM place LEFT JOIN (SELECT id, seq FROM page ORDER BY id DESC, seq DESC LIMIT 1) AS reached ON true
    WHERE e.embedder_id = place.embedder_id
    RETURNING e.walked_kind
"""

WALK_MESSAGES = Statement(
    "embedding.walk_messages",
    _WALK.format(
        at_rest=_WALK_IS_DUE,
        kind="message",
        kind_after="'memory'",
        page="""
        SELECT session_id AS id, seq, user_id, occurred_at FROM message_words
        WHERE (session_id, seq) > (%(id)s::uuid, %(seq)s::bigint)
        ORDER BY session_id, seq LIMIT %(most)s
        """,
        vector="""
            SELECT FROM message_vectors AS v
            WHERE v.session_id = page.id AND v.seq = page.seq AND v.embedder_id = %(embedder_id)s""",
        unless=f" AND NOT {_EXPIRED.format(at='page.occurred_at')}",
        also=""", halved AS (
        UPDATE message_vectors AS v SET half = v.vector, vector = NULL
        FROM place, page
        WHERE v.session_id = page.id AND v.seq = page.seq AND v.embedder_id = place.embedder_id
          AND v.vector IS NOT NULL
    )""",
    ),
)

WALK_MEMORIES = Statement(
    "embedding.walk_memories",
    _WALK.format(
        at_rest=_WALK_IS_DUE,
        kind="memory",
        kind_after="NULL::text",
        page="""
        SELECT memory_id AS id, 0::bigint AS seq, user_id FROM memories
        WHERE memory_id > %(id)s::uuid AND %(seq)s::bigint IS NOT NULL
        ORDER BY memory_id LIMIT %(most)s
        """,
        vector="""
            SELECT FROM memory_vectors AS v WHERE v.memory_id = page.id AND v.embedder_id = %(embedder_id)s""",
        unless="",
        also="",
    ),
)

# --- indexes -----------------------------------------------------------------------------

OF_NAME = Statement(
    "embedding.of_name",
    """
    SELECT embedder_id, dimensions, indexed_at IS NOT NULL AND half_indexed_at IS NOT NULL AS indexed FROM embedders
    WHERE name = %(name)s ORDER BY embedder_id
    """,
    writes=False,
)

# Whether the messages or the memories have at least `rows` vectors. Counts no further than `rows`.
HAS_ENOUGH_VECTORS = Statement(
    "embedding.large",
    """
    SELECT greatest(
        (SELECT count(*) FROM (SELECT FROM message_vectors WHERE embedder_id = %(embedder_id)s LIMIT %(rows)s) AS s),
        (SELECT count(*) FROM (SELECT FROM memory_vectors WHERE embedder_id = %(embedder_id)s LIMIT %(rows)s) AS s)
    ) >= %(rows)s AS large
    """,
    writes=False,
)

MARK_INDEXED = Statement(
    "embedding.indexed",
    """
    UPDATE embedders SET indexed_at = coalesce(indexed_at, perdure_now()), half_indexed_at = perdure_now()
    WHERE embedder_id = %(embedder_id)s
    """,
)
