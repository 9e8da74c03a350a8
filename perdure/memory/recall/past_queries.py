"""The SQL statements of a prompt's past. A turn runs at most two; each reads a bounded number of rows."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.failures import REMEMBERED

# All sessions in the fork tree of a session, including the session itself.
_FAMILY = """
    WITH RECURSIVE family (session_id, forked_from) AS (
        SELECT session_id, forked_from FROM sessions WHERE session_id = %(session_id)s
        UNION
        SELECT near.session_id, near.forked_from
        FROM family CROSS JOIN LATERAL (
            SELECT session_id, forked_from FROM sessions WHERE session_id = family.forked_from
            UNION ALL
            SELECT session_id, forked_from FROM sessions WHERE forked_from = family.session_id) AS near
    )
"""

_SEARCHABLE = "bank = %(bank)s::text AND embedder = %(embedder)s AND status = 'active' AND query_vector IS NOT NULL"

RELATED_SESSIONS = Statement(
    "context.kin",
    f"{_FAMILY} SELECT session_id FROM family WHERE session_id <> %(session_id)s",  # noqa: S608 (constants)
    writes=False,
)

# The content that does not depend on the question. The column `section` of a row is one of:
#
#     archive: the summary of an earlier session, newest first. Only the newest 2 * `archive` sessions are read. Without
#         this limit, the statement would read all sessions of a user whose sessions have no summary.
#     meta: a hot memory.
#     kin: the id of another session in the fork tree.
#     past: this row exists if the user has something to recall.
#     bank: this row exists if the agent's bank has cases of this embedder that this user may see. The parameter `bank`
#         is NULL for an agent without a bank.
#
# An SQL expression, so that a turn can read it together with its transcript: a JSON array of the rows, each an array of
# `section`, `content`, `at` and `id`.
PAST = f"""
    (SELECT json_agg(json_build_array(section, content, at, id) ORDER BY section, position)::text FROM (
        {_FAMILY}
        SELECT * FROM (
            SELECT 'archive' AS section, row_number() OVER (ORDER BY created_at DESC) AS position,
                   summary AS content, created_at AS at, session_id AS id
            FROM (
                SELECT s.session_id, s.created_at, s.summary FROM sessions AS s
                WHERE s.user_id = %(user_id)s AND s.session_id NOT IN (SELECT session_id FROM family)
                  AND s.forked_from IS NULL
                  AND s.session_id IS DISTINCT FROM %(previous_id)s::uuid
                  AND s.scope = (SELECT scope FROM sessions WHERE session_id = %(session_id)s)
                ORDER BY s.created_at DESC LIMIT %(archive)s * 2) AS newest
            WHERE summary <> ''
            ORDER BY created_at DESC LIMIT %(archive)s) AS archive
        UNION ALL
        SELECT * FROM (
            SELECT 'meta', h.rank, m.content, m.valid_from, m.memory_id
            FROM hot_memories AS h JOIN memories AS m USING (memory_id)
            WHERE h.user_id = %(user_id)s AND m.valid_to IS NULL AND m.archived_at IS NULL
            ORDER BY h.rank LIMIT %(hot)s) AS hot
        UNION ALL
        SELECT 'kin', 1, session_id::text, NULL, NULL FROM family WHERE session_id <> %(session_id)s
        UNION ALL
        SELECT 'past', 1, '', NULL, NULL
        WHERE EXISTS (SELECT FROM sessions WHERE user_id = %(user_id)s AND session_id <> %(session_id)s)
           OR EXISTS (SELECT FROM memories WHERE user_id = %(user_id)s)
        UNION ALL
        SELECT 'bank', 1, '', NULL, NULL
        WHERE %(tenant)s::text IS NULL AND EXISTS (SELECT FROM cases WHERE user_id IS NULL AND {_SEARCHABLE})
           OR EXISTS (SELECT FROM cases WHERE user_id = ANY (%(authors)s::text[]) AND {_SEARCHABLE})
           OR EXISTS (SELECT FROM cases WHERE user_id IS NOT NULL AND shared_at IS NOT NULL
                             AND CASE WHEN strpos(user_id, chr(31)) > 0 THEN split_part(user_id, chr(31), 1) END
                                 IS NOT DISTINCT FROM %(tenant)s::text AND {_SEARCHABLE})
           OR %(all_cases)s AND EXISTS (SELECT FROM cases WHERE {_SEARCHABLE})
    ) AS past)
"""  # noqa: S608 (constants)

READ_PAST = Statement("context.past", f"SELECT {PAST} AS past", writes=False)

# The source messages of recalled memories, and the relations of their entities up to depth 2. For each entity, only the
# newest `fan_out` relations are followed. A message that is left out of memory is no source: the memories that were
# extracted before stay, and may be recalled in other conversations.
AROUND = Statement(
    "context.around",
    f"""
    WITH RECURSIVE walk (entity_id, depth) AS (
        SELECT * FROM (
            SELECT DISTINCT entity_id, 0 FROM entity_mentions AS e JOIN memories AS m USING (memory_id)
            WHERE memory_id = ANY (%(memory_ids)s::uuid[]) AND m.user_id = %(user_id)s
            LIMIT %(entities)s) AS seeds
        UNION
        SELECT near.entity_id, walk.depth + 1
        FROM walk CROSS JOIN LATERAL (
            SELECT CASE WHEN r.source_id = walk.entity_id THEN r.target_id ELSE r.source_id END AS entity_id
            FROM relations AS r
            WHERE (r.source_id = walk.entity_id OR r.target_id = walk.entity_id) AND r.user_id = %(user_id)s
            ORDER BY r.created_at DESC LIMIT %(fan_out)s) AS near
        WHERE walk.depth < 1
    ), found AS (
        SELECT r.source_id, r.predicate, r.target_id, min(walk.depth) AS depth, max(r.created_at) AS at
        FROM walk CROSS JOIN LATERAL (
            SELECT * FROM relations AS r
            WHERE (r.source_id = walk.entity_id OR r.target_id = walk.entity_id) AND r.user_id = %(user_id)s
            ORDER BY r.created_at DESC LIMIT %(fan_out)s) AS r
        JOIN memories AS m USING (memory_id)
        WHERE m.valid_to IS NULL AND m.archived_at IS NULL
        GROUP BY r.source_id, r.predicate, r.target_id
        ORDER BY depth, at DESC LIMIT %(relations)s
    )
    SELECT 'concepts' AS section, f.depth::bigint AS position, NULL::uuid AS memory_id,
           one.name || ' — ' || f.predicate || ' — ' || other.name AS content, f.at
    FROM found AS f
    JOIN entities AS one ON one.entity_id = f.source_id JOIN entities AS other ON other.entity_id = f.target_id
    UNION ALL
    SELECT 'source', said.number, said.memory_id, said.content, said.created_at
    FROM unnest(%(memory_ids)s::uuid[]) AS wanted (memory_id)
    CROSS JOIN LATERAL (
        SELECT s.memory_id, left(m.content, %(most_chars)s + 1) AS content, m.created_at,
               row_number() OVER (ORDER BY m.created_at DESC, m.seq DESC) AS number
        FROM memory_sources AS s JOIN messages AS m USING (session_id, seq)
        JOIN sessions ON sessions.session_id = s.session_id AND sessions.user_id = %(user_id)s
        WHERE s.memory_id = wanted.memory_id AND {REMEMBERED}
        ORDER BY number LIMIT %(sources)s) AS said
    ORDER BY section, position, at DESC
    """,  # noqa: S608 (constants)
    writes=False,
)
