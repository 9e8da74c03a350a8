"""The SQL statements of consolidation."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.failures import REMEMBERED, SPOKEN
from perdure.database.fencing import HELD, RAISED
from perdure.database.keyed import keyed

# --- the sessions that are due -----------------------------------------------------------

# The condition of a session that a run may claim. `consolidation_given_up_at` excludes abandoned sessions here and in
# the partial indexes. If the process of the last allowed run died, the count of attempts excludes the session until the
# sweeper marks it as abandoned (TO_WAKE). A lease that ends more than two lease times from now is ignored: it
# was granted while PostgreSQL's clock was wrong.
_FREE = """
    ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL
      AND consolidation_attempts < %(max_runs)s
      AND (lease_until IS NULL OR lease_until <= perdure_now()
           OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s::double precision * 2))
"""

_EARLIER_WAITS = """
    earlier.ended_at IS NOT NULL AND earlier.consolidated_at IS NULL AND earlier.consolidation_given_up_at IS NULL
""".strip()

DUE = Statement(
    "consolidation.due",
    f"""
    SELECT session_id, user_id FROM sessions WHERE {_FREE}
    ORDER BY ended_at, session_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

# The sessions for which the sweeper sends a new task: the task was lost, the worker died, or the last run failed. Each
# new task doubles the pause before the next one, so that a queue without a worker fills slowly. If the process of the
# last allowed run died, this statement marks the session as abandoned. The update uses an array instead of a join,
# because PostgreSQL's generic plan does not know the limit and would join with the whole table.
TO_WAKE = Statement(
    "consolidation.forgotten",
    """
    WITH due AS (
        SELECT session_id FROM sessions
        WHERE ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL
          AND coalesce(consolidation_due_at, ended_at) <= perdure_now()
          AND (consolidation_due_at IS NOT NULL OR ended_at <= perdure_now() - make_interval(secs => %(backoff_s)s))
          AND (lease_until IS NULL OR lease_until <= perdure_now()
               OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s::double precision * 2))
        ORDER BY coalesce(consolidation_due_at, ended_at) LIMIT %(most)s
        FOR NO KEY UPDATE SKIP LOCKED
    ), noted AS (
        UPDATE sessions AS s
        SET wakes = s.wakes + 1,
            consolidation_due_at = perdure_now() + make_interval(secs => %(backoff_s)s * 2 ^ least(s.wakes, 10)),
            consolidation_given_up_at = CASE WHEN s.consolidation_attempts >= %(max_runs)s THEN perdure_now() END
        WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM due))
        RETURNING s.session_id, s.consolidation_given_up_at
    )
    SELECT session_id FROM noted WHERE consolidation_given_up_at IS NULL
    """,
)

# Makes the next sweep send new tasks for these sessions, because the broker refused their tasks.
REQUEUE = Statement(
    "consolidation.unwake",
    """
    UPDATE sessions SET consolidation_due_at = perdure_now(), wakes = greatest(wakes - 1, 0)
    WHERE session_id = ANY (%(session_ids)s::uuid[]) AND consolidated_at IS NULL
    """,
)

# Counts the run when it begins, so that a run that crashes its process is counted. `own_turns` excludes the turns that
# a fork copied from its source session. What a user said is consolidated in the order in which it was said: a session
# is not claimed while another process has an earlier one of the user, and a locked session is waited for. Only a
# session whose run failed is passed over.
CLAIM = Statement(
    "consolidation.claim",
    f"""
    WITH candidate AS (
        SELECT session_id FROM sessions AS s
        WHERE session_id = %(session_id)s AND {keyed(_FREE)} AND NOT EXISTS (
            SELECT FROM sessions AS earlier
            WHERE earlier.user_id = s.user_id AND {keyed(_EARLIER_WAITS)}
              AND (earlier.ended_at, earlier.session_id) < (s.ended_at, s.session_id)
              AND earlier.lease_until > perdure_now()
              AND earlier.lease_until <= perdure_now() + make_interval(secs => %(lease_s)s::double precision * 2))
        FOR NO KEY UPDATE OF s
    )
    UPDATE sessions AS s
    SET {RAISED}, lease_owner = %(owner)s, consolidation_attempts = s.consolidation_attempts + 1,
        lease_until = perdure_now() + make_interval(secs => %(lease_s)s::double precision), wakes = 0,
        consolidation_due_at = NULL, consolidation_error = 'UNKNOWN: the run was interrupted'
    FROM candidate WHERE s.session_id = candidate.session_id
    RETURNING s.token, s.nonce, s.user_id, s.message_count, s.consolidation_attempts AS runs,
              CASE WHEN s.forked_from IS NULL THEN s.turn_count
                   ELSE (SELECT count(*) FROM turns AS t
                         WHERE t.session_id = s.session_id AND t.accepted_at >= s.created_at) END AS own_turns
    """,  # noqa: S608 (constants)
)

RELEASE = Statement(
    "consolidation.release",
    f"""
    UPDATE sessions
    SET lease_until = NULL, lease_owner = NULL,
        consolidation_error = %(error)s::text,
        consolidation_attempts = consolidation_attempts - CASE WHEN %(forgiven)s THEN 1 ELSE 0 END,
        consolidation_given_up_at = CASE WHEN %(given_up)s THEN perdure_now() END,
        consolidation_due_at = CASE WHEN %(error)s::text IS NOT NULL THEN
            perdure_now() + make_interval(secs => %(pause_s)s * 2 ^ least(consolidation_attempts - 1, 10)) END
    WHERE {HELD}
    RETURNING session_id
    """,  # noqa: S608 (constants)
)

MARK = Statement(
    "consolidation.mark",
    f"""
    UPDATE sessions
    SET consolidated_at = perdure_now(), consolidation = %(outcome)s::jsonb, consolidation_error = NULL,
        lease_until = NULL, lease_owner = NULL
    WHERE {HELD}
    RETURNING session_id
    """,  # noqa: S608 (constants)
)

BACKLOG = Statement(
    "consolidation.backlog",
    """
    SELECT count(*) FILTER (WHERE consolidation_attempts < %(max_runs)s) AS waiting,
           count(*) FILTER (WHERE consolidation_attempts BETWEEN 1 AND %(max_runs)s - 1) AS failing,
           (SELECT count(*) FROM sessions WHERE consolidation_given_up_at IS NOT NULL)
             + count(*) FILTER (WHERE consolidation_attempts >= %(max_runs)s) AS given_up
    FROM sessions
    WHERE ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL
    """,
    writes=False,
)

COUNT_GIVEN_UP = Statement(
    "consolidation.count_given_up",
    "SELECT count(*) AS sessions FROM sessions WHERE consolidation_given_up_at IS NOT NULL",
    writes=False,
)

# Makes abandoned sessions due again with a run count of 0, except sessions with an active lease.
RETRY = Statement(
    "consolidation.retry",
    """
    WITH given_up AS (
        SELECT session_id FROM sessions
        WHERE session_id = ANY (%(session_ids)s::uuid[])
          AND ended_at IS NOT NULL AND consolidated_at IS NULL
          AND (consolidation_given_up_at IS NOT NULL OR consolidation_attempts >= %(max_runs)s)
          AND (lease_until IS NULL OR lease_until <= perdure_now()
               OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s::double precision * 2))
        FOR NO KEY UPDATE
    )
    UPDATE sessions AS s
    SET consolidation_given_up_at = NULL, consolidation_attempts = 0, consolidation_due_at = NULL, wakes = 0
    WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM given_up))
    RETURNING s.session_id
    """,
)

GIVEN_UP = Statement(
    "consolidation.given_up",
    """
    SELECT session_id FROM sessions
    WHERE consolidation_given_up_at IS NOT NULL
    ORDER BY consolidation_given_up_at, session_id LIMIT %(most)s
    """,
    writes=False,
)

# The messages that are marked as forgotten, and the replies of their turns, which may repeat them.
FORGOTTEN = """
    EXISTS (SELECT FROM forgotten_messages AS f JOIN messages AS said USING (session_id, seq)
            WHERE f.session_id = m.session_id
              AND (f.seq = m.seq OR m.role = 'assistant' AND said.role = 'user' AND said.turn_id = m.turn_id))
""".strip()

# A message that a schedule sent (`timetable.reminders.message_id`). The user or an agent wrote it when the schedule was
# made, so it does not say what holds now.
_SCHEDULED = "coalesce(m.message_id LIKE 'schedule:________-____-____-____-____________:%%', false)"

# Without the replies of failed turns, the messages of schedules, turns of which nothing may be remembered, and the
# sources of memories that the user has had forgotten, with what repeats these.
CONVERSATION = Statement(
    "consolidation.conversation",
    f"""
    SELECT m.seq, m.role, left(m.content, %(most_chars)s) AS content, m.created_at, m.channel, m.author,
           (SELECT t.metadata ->> 'timezone' FROM turns AS t WHERE t.turn_id = m.turn_id) AS timezone
    FROM messages AS m JOIN sessions AS s USING (session_id)
    WHERE m.session_id = %(session_id)s AND m.role IN ('user', 'assistant') AND m.content <> ''
      AND (s.forked_from IS NULL OR m.created_at >= s.created_at) AND {SPOKEN} AND {REMEMBERED}
      AND NOT {FORGOTTEN} AND NOT {_SCHEDULED}
    ORDER BY m.seq
    """,  # noqa: S608 (constants)
    writes=False,
)

HAS_MEMORIES = Statement(
    "consolidation.has_memories",
    "SELECT FROM memories WHERE user_id = %(user_id)s AND valid_to IS NULL ORDER BY valid_from LIMIT 1",
    writes=False,
)

# --- merging: within one transaction -----------------------------------------------------

# Limits the wait for a concurrent merge of the same user. A merge is short because it calls no model.
SET_LOCK_TIMEOUT = Statement(
    "consolidation.be_patient", "SELECT set_config('lock_timeout', %(timeout)s, true)", writes=False
)

CHECK_TOKEN = Statement(
    "consolidation.check_token",
    f"""
    SELECT session_id FROM sessions WHERE {HELD} FOR NO KEY UPDATE
    """,  # noqa: S608 (constants)
)

LOCK_USER = Statement(
    "consolidation.lock_user", "SELECT user_id FROM users WHERE user_id = %(user_id)s FOR NO KEY UPDATE"
)

# The current memories that are nearest to what is said: for each vector the `each` nearest, and the `each` best by
# words, of which `words` are alternatives. The search is exact: it compares all rows of the user. `coalesce` keeps it
# from the index of words, which would find the rows of all users.
KNOWN = Statement(
    "consolidation.known",
    """
    WITH current AS NOT MATERIALIZED (
        SELECT memory_id, content, valid_from, attribute, words FROM memories
        WHERE user_id = %(user_id)s AND valid_to IS NULL AND archived_at IS NULL
    ), near AS (
        SELECT nearest.memory_id, nearest.distance
        FROM unnest(%(vectors)s::text[]) AS said (vector)
        CROSS JOIN LATERAL (
            SELECT v.memory_id, v.vector OPERATOR(@vector.<=>) said.vector::@vector.vector AS distance
            FROM memory_vectors AS v JOIN current USING (memory_id)
            WHERE v.user_id = %(user_id)s AND v.embedder_id = %(embedder_id)s AND v.vector IS NOT NULL
            ORDER BY distance, v.memory_id LIMIT %(each)s) AS nearest
    ), said AS MATERIALIZED (
        SELECT string_agg(array_to_tsvector(ARRAY[term])::text, ' | ')::tsquery AS terms
        FROM (SELECT DISTINCT unnest(tsvector_to_array(perdure_words(text))) AS term
              FROM unnest(%(texts)s::text[]) AS text) AS spoken
    ), by_words AS (
        SELECT memory_id, ts_rank(words, (SELECT terms FROM said), 1) AS rank FROM current
        WHERE coalesce(words @@ (SELECT terms FROM said), false)
        ORDER BY rank DESC, memory_id LIMIT %(most)s / 2
    ), found AS (
        SELECT memory_id, 0 AS distance FROM by_words UNION ALL SELECT memory_id, distance FROM near
    )
    SELECT memory_id, content, valid_from, attribute
    FROM current JOIN (SELECT memory_id, min(distance) AS distance FROM found GROUP BY memory_id) AS best
         USING (memory_id)
    ORDER BY distance, memory_id LIMIT %(most)s
    """,
    writes=False,
)

# The user's memories near a candidate that are valid now or were still valid at the candidate's date (`said_at`), each
# with the time of its latest source, or of the latest correction to its words: the `most` nearest by vector, the `most`
# best by words, those of the same subject and attribute, and those in `named`, which the model has named. Order:
# memories valid at `said_at` first, superseded ones before current ones, then by similarity. The search is exact: it
# compares all rows of the user, as that of `KNOWN`. A memory without a vector of this embedder is found only by words.
SIMILAR = Statement(
    "consolidation.similar",
    """
    WITH own AS NOT MATERIALIZED (
        SELECT * FROM memories
        WHERE user_id = %(user_id)s AND (valid_to IS NULL OR valid_to >= %(said_at)s::timestamptz)
          AND archived_at IS NULL
    ), said AS MATERIALIZED (
        SELECT string_agg(array_to_tsvector(ARRAY[term])::text, ' | ')::tsquery AS terms
        FROM unnest(tsvector_to_array(perdure_words(%(content)s))) AS term
    ), found AS (
        (SELECT v.memory_id FROM memory_vectors AS v JOIN own USING (memory_id)
         WHERE v.user_id = %(user_id)s AND v.embedder_id = %(embedder_id)s AND v.vector IS NOT NULL
           AND %(vector)s::text IS NOT NULL
         ORDER BY v.vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector, v.memory_id LIMIT %(most)s)
        UNION
        (SELECT memory_id FROM own WHERE coalesce(words @@ (SELECT terms FROM said), false)
         ORDER BY ts_rank(words, (SELECT terms FROM said), 1) DESC, memory_id LIMIT %(most)s)
        UNION
        (SELECT memory_id FROM own WHERE %(attribute)s <> '' AND subject = %(subject)s AND attribute = %(attribute)s
         ORDER BY valid_from DESC, memory_id LIMIT %(most)s)
        UNION
        SELECT memory_id FROM own WHERE content = %(content)s OR memory_id = ANY (%(named)s::uuid[])
    )
    SELECT m.memory_id, m.kind, m.content, m.subject, m.attribute, m.valid_from, m.valid_to IS NULL AS holds,
           1 - (v.vector OPERATOR(@vector.<=>) %(vector)s::@vector.vector) AS similarity,
           greatest(m.valid_from, (SELECT max(said.created_at) FROM memory_sources AS s
                                   JOIN messages AS said USING (session_id, seq)
                                   WHERE s.memory_id = m.memory_id),
                    (SELECT max(wrong.valid_to) FROM memories AS wrong
                     WHERE wrong.superseded_by = m.memory_id AND m.origin = 'user')) AS last_said_at
    FROM found JOIN own AS m USING (memory_id)
    LEFT JOIN memory_vectors AS v ON v.memory_id = m.memory_id AND v.embedder_id = %(embedder_id)s
    ORDER BY m.valid_from <= %(said_at)s::timestamptz DESC, m.valid_to IS NULL, similarity DESC NULLS LAST, m.memory_id
    """,
    writes=False,
)

STORE = Statement(
    "consolidation.store",
    """
    WITH stored AS (
        INSERT INTO memories (memory_id, user_id, kind, content, importance, value, decayed_at, channels, origin,
                              session_id, created_at, valid_from, valid_to, superseded_by, subject, attribute)
        VALUES (%(memory_id)s, %(user_id)s, %(kind)s, %(content)s, %(importance)s, %(importance)s, perdure_now(),
                %(channels)s::text[], 'consolidation', %(session_id)s, perdure_now(), %(valid_from)s::timestamptz,
                %(valid_to)s::timestamptz, %(superseded_by)s::uuid, %(subject)s, %(attribute)s)
        RETURNING memory_id
    )
    INSERT INTO memory_vectors (memory_id, embedder_id, user_id, vector)
    SELECT memory_id, %(embedder_id)s, %(user_id)s, %(vector)s::@vector.vector FROM stored
    """,
)

REINFORCE = Statement(
    "consolidation.reinforce",
    """
    UPDATE memories
    SET importance = least(1, importance + %(boost)s::double precision),
        value = least(1, value + %(boost)s::double precision),
        access_count = access_count + 1, last_accessed_at = perdure_now(),
        channels = channels || ARRAY(SELECT unnest(%(channels)s::text[]) EXCEPT SELECT unnest(channels) ORDER BY 1)
    WHERE memory_id = %(memory_id)s
    """,
)

# Ends the validity of memories at `at`: when the candidate that contradicts them was said, or holds from.
SUPERSEDE = Statement(
    "consolidation.supersede",
    """
    UPDATE memories SET superseded_by = %(by)s, valid_to = greatest(valid_from, %(at)s::timestamptz)
    WHERE memory_id = ANY (%(memory_ids)s::uuid[])
    """,
)

# What a memory has superseded. What its owner has corrected is left out: it was wrong. Its messages are sources of the
# correction, too.
ENDED_BY = Statement(
    "consolidation.ended_by",
    """
    SELECT e.memory_id, e.content, e.subject, e.attribute, e.valid_from
    FROM memories AS m JOIN memories AS e ON e.superseded_by = m.memory_id
    WHERE m.memory_id = %(memory_id)s AND m.user_id = %(user_id)s AND (m.origin <> 'user' OR (
        SELECT bool_and(own.memory_id IS NULL) FROM memory_sources AS s LEFT JOIN memory_sources AS own
          ON own.memory_id = m.memory_id AND own.session_id = s.session_id AND own.seq = s.seq
        WHERE s.memory_id = e.memory_id))
    ORDER BY e.memory_id
    """,
    writes=False,
)

# Ends a memory at another time than before, or lets it hold again (`at` is NULL).
END_AT = Statement(
    "consolidation.end_at",
    """
    UPDATE memories
    SET superseded_by = %(by)s::uuid,
        valid_to = CASE WHEN %(at)s::timestamptz IS NOT NULL THEN greatest(valid_from, %(at)s::timestamptz) END
    WHERE memory_id = %(memory_id)s
    """,
)

ADD_SOURCES = Statement(
    "consolidation.add_sources",
    """
    INSERT INTO memory_sources (memory_id, session_id, seq)
    SELECT %(memory_id)s::uuid, %(session_id)s::uuid, seq FROM unnest(%(seqs)s::bigint[]) AS seq
    ON CONFLICT DO NOTHING
    """,
)

# An existing entity keeps its name. Its kind changes only if it is NULL.
ADD_ENTITIES = Statement(
    "consolidation.add_entities",
    """
    INSERT INTO entities (entity_id, user_id, name, key, kind, created_at)
    SELECT entity_id, %(user_id)s, name, key, kind, perdure_now()
    FROM unnest(%(entity_ids)s::uuid[], %(names)s::text[], %(keys)s::text[], %(kinds)s::text[])
        AS given (entity_id, name, key, kind)
    ON CONFLICT (user_id, key) DO UPDATE SET kind = coalesce(entities.kind, excluded.kind)
    RETURNING entity_id, key
    """,
)

MENTION = Statement(
    "consolidation.mention",
    """
    INSERT INTO entity_mentions (entity_id, memory_id)
    SELECT entity_id, %(memory_id)s::uuid FROM unnest(%(entity_ids)s::uuid[]) AS entity_id
    ON CONFLICT DO NOTHING
    """,
)

RELATE = Statement(
    "consolidation.relate",
    """
    INSERT INTO relations (source_id, predicate, target_id, memory_id, user_id, created_at)
    SELECT source_id, predicate, target_id, %(memory_id)s::uuid, %(user_id)s, perdure_now()
    FROM unnest(%(source_ids)s::uuid[], %(predicates)s::text[], %(target_ids)s::uuid[])
        AS given (source_id, predicate, target_id)
    ON CONFLICT DO NOTHING
    """,
)
