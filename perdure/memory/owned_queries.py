"""The SQL statements of a user's own view of the memories."""

from __future__ import annotations

from perdure.database.engine import Statement

_MEMORY = """
    SELECT w.memory_id, w.kind, w.content, w.subject, w.attribute, w.importance, w.valid_from, w.valid_to,
           ARRAY(SELECT coalesce(m.message_id, m.session_id || ':' || m.seq)
                 FROM memory_sources AS s JOIN messages AS m USING (session_id, seq)
                 WHERE s.memory_id = w.memory_id ORDER BY m.created_at, m.session_id, m.seq LIMIT 1000) AS message_ids
    FROM memories AS w
"""

OWNER = Statement("memories.owner", "SELECT user_id FROM memories WHERE memory_id = %(memory_id)s", writes=False)

READ = Statement("memories.read", f"{_MEMORY} WHERE w.memory_id = %(memory_id)s", writes=False)

SOURCES = Statement(
    "memories.sources",
    """
    SELECT coalesce(m.message_id, m.session_id || ':' || m.seq) AS message_id, m.session_id, m.channel, m.role,
           left(m.content, %(most_chars)s) AS text, m.created_at,
           CASE WHEN s.scope LIKE '/%%' THEN substr(s.scope, 2) END AS conversation
    FROM memory_sources AS e JOIN messages AS m USING (session_id, seq) JOIN sessions AS s USING (session_id)
    WHERE e.memory_id = %(memory_id)s ORDER BY m.created_at, m.session_id, m.seq LIMIT %(most)s
    """,
    writes=False,
)

# The newest turns whose prompts had the memory. Only a turn's first reply has the parts of its prompt. If the model has
# found the memory with `recall`, the result names it.
USES = Statement(
    "memories.uses",
    """
    SELECT m.turn_id, m.session_id, min(m.created_at) AS created_at,
           CASE WHEN s.scope LIKE '/%%' THEN substr(s.scope, 2) END AS conversation
    FROM memories AS w JOIN sessions AS s USING (user_id) JOIN messages AS m ON m.session_id = s.session_id
    WHERE w.memory_id = %(memory_id)s AND m.created_at >= w.created_at
      AND (m.prompt @> jsonb_build_object(
               'parts', jsonb_build_array(jsonb_build_object('ids', jsonb_build_array(w.memory_id::text))))
           OR m.role = 'tool' AND strpos(m.content, '[memory ' || w.memory_id || ',') > 0)
    GROUP BY m.turn_id, m.session_id, s.scope ORDER BY created_at DESC, m.turn_id LIMIT %(most)s
    """,
    writes=False,
)

LIST = Statement(
    "memories.list",
    f"""
    {_MEMORY} WHERE w.user_id = %(user_id)s
      AND (%(after)s::uuid IS NULL
           OR (w.valid_from, w.memory_id) < (SELECT a.valid_from, a.memory_id FROM memories AS a
                                             WHERE a.memory_id = %(after)s AND a.user_id = %(user_id)s))
    ORDER BY w.valid_from DESC, w.memory_id DESC LIMIT %(limit)s
    """,  # noqa: S608 (constants)
    writes=False,
)

TO_CORRECT = Statement(
    "memories.to_correct",
    """
    SELECT m.content, m.superseded_by, m.valid_to IS NULL AS holds,
           (SELECT newer.content FROM memories AS newer
            WHERE newer.memory_id = m.superseded_by AND newer.origin = 'user') AS newer_content
    FROM memories AS m WHERE m.memory_id = %(memory_id)s AND m.user_id = %(user_id)s FOR NO KEY UPDATE
    """,
)

# The new memory is embedded later (`embed_missing`). Its subject and attribute are the old one's if the rules read none
# in its words (`is_read`). A corrected quotation is a fact, unless the new words still give instructions to a model.
CORRECT = Statement(
    "memories.correct",
    """
    WITH made AS (
        INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, session_id,
                              created_at, valid_from, subject, attribute)
        SELECT %(new_id)s, user_id, CASE WHEN kind = 'conversation' AND NOT %(instructs)s THEN 'fact' ELSE kind END,
               %(content)s, importance, importance, channels, 'user', session_id, perdure_now(), perdure_now(),
               CASE WHEN %(is_read)s THEN %(subject)s ELSE subject END,
               CASE WHEN %(is_read)s THEN %(attribute)s ELSE attribute END
        FROM memories WHERE memory_id = %(memory_id)s
        RETURNING memory_id, user_id
    ), sources AS (
        INSERT INTO memory_sources (memory_id, session_id, seq)
        SELECT %(new_id)s, session_id, seq FROM memory_sources WHERE memory_id = %(memory_id)s
    )
    INSERT INTO unembedded (kind, id, seq, user_id, due_at)
    SELECT 'memory', memory_id, 0, user_id, perdure_now() FROM made
    """,
)

# A memory whose words are those of a correction holds, and has the messages of the corrected memory, too.
CONFIRM = Statement(
    "memories.confirm",
    """
    WITH sources AS (
        INSERT INTO memory_sources (memory_id, session_id, seq)
        SELECT %(confirmed_id)s, session_id, seq FROM memory_sources WHERE memory_id = %(memory_id)s
        ON CONFLICT DO NOTHING
    )
    UPDATE memories
    SET origin = 'user', superseded_by = NULL, valid_to = NULL, archived_at = NULL, last_accessed_at = perdure_now()
    WHERE memory_id = %(confirmed_id)s AND user_id = %(user_id)s
    """,
)

END = Statement(
    "memories.end",
    """
    UPDATE memories SET superseded_by = %(by)s, valid_to = greatest(valid_from, perdure_now())
    WHERE memory_id = ANY (%(memory_ids)s::uuid[]) AND user_id = %(user_id)s
    """,
)
