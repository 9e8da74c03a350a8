"""The SQL statements of an agent's memory tools."""

from __future__ import annotations

from perdure.database.engine import Statement

# An erasure of the user waits for this lock. After an erasure, this statement returns no row. `is_remembered` is false
# if nothing of the turn may be remembered, or of a turn that has delegated it: the delegate's turn has the call's id.
LOCK_SESSION = Statement(
    "own.lock_session",
    """
    SELECT s.session_id, NOT EXISTS (
        WITH RECURSIVE asking AS (
            SELECT %(turn_id)s::uuid AS turn_id
            UNION
            SELECT e.turn_id FROM asking JOIN tool_effects AS e ON e.effect_id = asking.turn_id
        )
        SELECT FROM asking JOIN turns AS t USING (turn_id) WHERE t.additions -> 'remember' = 'false') AS is_remembered
    FROM sessions AS s WHERE s.session_id = %(session_id)s AND s.user_id = %(user_id)s FOR KEY SHARE OF s
    """,
)

# Idempotent, because the memory's id is the `effect_id` of the tool call. `embed_missing` makes the memory's vector.
REMEMBER = Statement(
    "own.remember",
    """
    WITH made AS (
        INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, session_id,
                              created_at, valid_from, subject, attribute)
        VALUES (%(memory_id)s, %(user_id)s, %(kind)s, %(content)s, %(importance)s, %(importance)s,
                ARRAY[%(channel)s], 'tool', %(session_id)s, perdure_now(), perdure_now(), %(subject)s,
                %(attribute)s)
        ON CONFLICT DO NOTHING
        RETURNING memory_id, user_id
    ), noted AS (
        INSERT INTO unembedded (kind, id, seq, user_id, due_at)
        SELECT 'memory', memory_id, 0, user_id, perdure_now() FROM made
    )
    SELECT memory_id FROM made
    """,
)

# The user's messages of the turn become the memory's sources.
ADD_TURN_SOURCES = Statement(
    "own.from_turn",
    """
    INSERT INTO memory_sources (memory_id, session_id, seq)
    SELECT %(memory_id)s, m.session_id, m.seq
    FROM turns AS t JOIN messages AS m
      ON m.session_id = t.session_id AND m.seq >= t.first_seq AND m.turn_id = t.turn_id AND m.role = 'user'
    JOIN sessions AS s ON s.session_id = t.session_id AND s.depth = 0
    WHERE t.turn_id = %(turn_id)s
    ON CONFLICT DO NOTHING
    """,
)

# The newest messages of the session, without those of the system. `is_source`: of the user, or a tool's
# result, in the turn `turn_id`.
NEWEST_SAID = Statement(
    "own.newest_said",
    """
    SELECT m.seq, m.role, left(m.content, %(most_chars)s) AS content,
           m.role IN ('user', 'tool') AND m.turn_id = %(turn_id)s AS is_source
    FROM messages AS m JOIN sessions AS s USING (session_id)
    WHERE m.session_id = %(session_id)s AND s.user_id = %(user_id)s AND m.role <> 'system'
    ORDER BY m.seq DESC LIMIT %(most)s
    """,
    writes=False,
)

MENTIONED_ENTITIES = Statement(
    "own.named",
    """
    SELECT e.entity_id FROM entity_mentions AS e JOIN memories AS m USING (memory_id)
    WHERE memory_id = %(memory_id)s AND m.user_id = %(user_id)s
    """,
    writes=False,
)

# What a memory has superseded is superseded by its successor, if it has one.
HAND_OVER = Statement(
    "own.hand_over",
    """
    UPDATE memories AS e SET superseded_by = m.superseded_by, valid_to = greatest(e.valid_from, m.valid_to)
    FROM memories AS m
    WHERE e.superseded_by = m.memory_id AND m.memory_id = %(memory_id)s AND m.user_id = %(user_id)s
      AND m.superseded_by IS NOT NULL
    """,
)

# The messages that have a word in common with a memory, in the sessions of its sources and in one other session: the
# first ones of each. `coalesce` keeps it from the index of words, which would find the messages of all users.
ALIKE = Statement(
    "own.alike",
    """
    WITH memory AS MATERIALIZED (
        SELECT memory_id, content FROM memories WHERE memory_id = %(memory_id)s AND user_id = %(user_id)s
    ), terms AS MATERIALIZED (
        SELECT string_agg(array_to_tsvector(ARRAY[term])::text, ' | ')::tsquery AS terms
        FROM memory, unnest(tsvector_to_array(perdure_words(content))) AS term
    ), sessions_of_it AS MATERIALIZED (
        SELECT s.session_id FROM memory_sources AS s JOIN memory USING (memory_id)
        UNION
        SELECT session_id FROM sessions WHERE session_id = %(session_id)s::uuid AND user_id = %(user_id)s
    )
    SELECT m.session_id, m.seq, left(m.content, %(most_chars)s) AS content, memory.content AS memory
    FROM memory CROSS JOIN sessions_of_it CROSS JOIN LATERAL (
        SELECT w.session_id, w.seq FROM message_words AS w
        WHERE w.session_id = sessions_of_it.session_id AND coalesce(w.words @@ (SELECT terms FROM terms), false)
        ORDER BY w.seq LIMIT %(most)s) AS alike
    JOIN messages AS m ON m.session_id = alike.session_id AND m.seq = alike.seq
    ORDER BY m.session_id, m.seq LIMIT %(most)s
    """,
    writes=False,
)

MARK_FORGOTTEN = Statement(
    "own.mark_forgotten",
    """
    INSERT INTO forgotten_messages (session_id, seq, forgotten_at)
    SELECT session_id, seq, perdure_now()
    FROM unnest(%(session_ids)s::uuid[], %(seqs)s::bigint[]) AS said (session_id, seq)
    ON CONFLICT DO NOTHING
    """,
)

# From the sources of a forgotten memory no memory is extracted again.
FORGET = Statement(
    "own.forget",
    """
    WITH noted AS (
        INSERT INTO forgotten_messages (session_id, seq, forgotten_at)
        SELECT s.session_id, s.seq, perdure_now() FROM memory_sources AS s JOIN memories AS m USING (memory_id)
        WHERE m.memory_id = %(memory_id)s AND m.user_id = %(user_id)s
        ON CONFLICT DO NOTHING
    )
    DELETE FROM memories WHERE memory_id = %(memory_id)s AND user_id = %(user_id)s RETURNING memory_id
    """,
)

# Deletes each of the given entities that no memory mentions and no relation refers to.
FORGET_ENTITIES = Statement(
    "own.forget_named",
    """
    DELETE FROM entities AS e
    WHERE e.entity_id = ANY (%(entity_ids)s::uuid[]) AND e.user_id = %(user_id)s
      AND NOT EXISTS (SELECT FROM entity_mentions AS m WHERE m.entity_id = e.entity_id)
      AND NOT EXISTS (SELECT FROM relations AS r WHERE r.source_id = e.entity_id OR r.target_id = e.entity_id)
    """,
)
