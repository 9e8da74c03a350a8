"""The SQL statements of `perdure.memory.import_export`."""

from __future__ import annotations

from perdure.access.tenants import OF_TENANT
from perdure.database.engine import Statement
from perdure.database.failures import WITH_FAILURE
from perdure.database.fencing import RAISED
from perdure.memory.consolidation.queries import FORGOTTEN

ENSURE_USER = Statement(
    "exchange.know_user",
    "INSERT INTO users (user_id, created_at) VALUES (%(user_id)s, perdure_now()) ON CONFLICT DO NOTHING",
)

# Creates the session of imported messages. The session has ended and is not routable: it receives no messages, and is
# never used as the user's previous session.
OPEN = Statement(
    "exchange.open",
    """
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, ended_at,
                          end_requested_at, end_reason, channels, imported_as)
    SELECT %(new_id)s::uuid, %(user_id)s, 'imported', false, %(agent)s, 'ended', %(first_at)s, %(last_at)s,
           perdure_now(), perdure_now(), 'imported', '{}', %(name)s
    WHERE NOT EXISTS (SELECT FROM sessions WHERE user_id = %(user_id)s AND session_id = %(own_id)s::uuid)
    ON CONFLICT (user_id, imported_as) WHERE imported_as IS NOT NULL DO NOTHING
    """,
)

# Finds and locks the session that a line's `session` names. If `session` is the id of a session of this user, as in a
# file exported from this database, that session is returned. Otherwise, `session` is the name of an imported session.
LOCK = Statement(
    "exchange.lock",
    """
    SELECT session_id, imported_as IS NOT NULL AS imported, message_count, last_turn_seq FROM sessions
    WHERE user_id = %(user_id)s AND (session_id = %(own_id)s::uuid OR imported_as = %(name)s)
    ORDER BY imported_as IS NOT NULL LIMIT 1
    FOR NO KEY UPDATE
    """,
)

FIND_MESSAGES = Statement(
    "exchange.known",
    """
    SELECT message_id, content, session_id || ':' || seq AS place, seq,
           EXISTS (SELECT FROM forgotten_messages AS f
                   WHERE f.session_id = m.session_id AND f.seq = m.seq) AS is_forgotten
    FROM messages AS m
    WHERE session_id = %(session_id)s
      AND (message_id = ANY (%(message_ids)s::text[]) OR session_id || ':' || seq = ANY (%(message_ids)s::text[]))
    """,
    writes=False,
)

# The memories from the turns of messages that are now forgotten, unless they have a source that is not.
OF_FORGOTTEN = Statement(
    "exchange.of_forgotten",
    f"""
    SELECT w.memory_id FROM memories AS w
    WHERE w.user_id = %(user_id)s
      AND w.memory_id = ANY (ARRAY(
          SELECT s.memory_id FROM messages AS f JOIN messages AS m USING (session_id, turn_id)
          JOIN memory_sources AS s ON s.session_id = m.session_id AND s.seq = m.seq
          WHERE f.session_id = %(session_id)s AND f.seq = ANY (%(seqs)s::bigint[])))
      AND NOT EXISTS (SELECT FROM memory_sources AS s JOIN messages AS m USING (session_id, seq)
                      WHERE s.memory_id = w.memory_id AND NOT {FORGOTTEN})
    ORDER BY w.memory_id
    """,  # noqa: S608 (constants)
    writes=False,
)

# Adds turns to an imported session, which is to be consolidated again. The fence is raised against a consolidation that
# runs: it has not read them.
ADD = Statement(
    "exchange.add",
    f"""
    WITH grown AS (
        UPDATE sessions AS s
        SET {RAISED}, lease_until = NULL, lease_owner = NULL,
            message_count = message_count + %(messages_added)s, last_turn_seq = last_turn_seq + %(turns_added)s,
            turn_count = turn_count + %(turns_added)s, tick = tick + %(turns_added)s, consolidated_at = NULL,
            consolidation = NULL, consolidation_attempts = 0, consolidation_given_up_at = NULL,
            consolidation_due_at = NULL, consolidation_error = NULL, wakes = 0,
            created_at = least(created_at, %(first_at)s), last_activity_at = greatest(last_activity_at, %(last_at)s),
            channels = s.channels || ARRAY(
                SELECT DISTINCT used FROM unnest(%(channels)s::text[]) AS used WHERE used <> ALL (s.channels))
        WHERE s.session_id = %(session_id)s
        RETURNING s.user_id, s.agent, s.tick - %(turns_added)s AS tick
    ), done AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, steps, first_seq,
                           reply_seq, error_code, error_message, accepted_at, settled_at, settled_tick, usage,
                           feedback, additions)
        SELECT t.turn_id, %(session_id)s, %(last_turn_seq)s + t.position, grown.user_id, coalesce(t.agent, grown.agent),
               t.channel, 5, t.status, t.steps, %(message_count)s + t.first, %(message_count)s + t.reply, t.error_code,
               t.error_message, t.accepted_at, t.settled_at, grown.tick + t.position, t.usage, t.feedback,
               CASE WHEN NOT t.remember THEN '{{"remember": false}}'::jsonb END
        FROM grown, jsonb_to_recordset(%(turns)s::jsonb) AS t (
            position int, turn_id uuid, agent text, channel text, status text, steps int, first int, reply int,
            error_code text, error_message text, accepted_at timestamptz, settled_at timestamptz, usage jsonb,
            feedback jsonb, remember boolean)
    ), forgotten AS (
        INSERT INTO forgotten_messages (session_id, seq, forgotten_at)
        SELECT %(session_id)s, %(message_count)s + m.position, perdure_now()
        FROM jsonb_to_recordset(%(messages)s::jsonb) AS m (position int, forgotten boolean) WHERE m.forgotten
    )
    INSERT INTO messages (session_id, seq, turn_id, role, content, message_id, channel, token_count, created_at, author,
                          tool_calls, tool_call_id, model, usage, stop_reason)
    SELECT %(session_id)s, %(message_count)s + m.position, m.turn_id, m.role, m.content, m.message_id, m.channel,
           m.token_count, m.occurred_at, m.author, m.tool_calls, m.tool_call_id, m.model, m.usage, m.stop_reason
    FROM jsonb_to_recordset(%(messages)s::jsonb) AS m (
        position int, turn_id uuid, role text, content text, message_id text, channel text, token_count int,
        occurred_at timestamptz, author text, tool_calls jsonb, tool_call_id text, model text, usage jsonb,
        stop_reason text)
    """,  # noqa: S608 (constants)
)

_MESSAGES = f"""
    SELECT s.user_id, coalesce(s.imported_as, s.session_id::text) AS session, m.session_id, m.seq,
           coalesce(m.message_id, m.session_id || ':' || m.seq) AS message_id, m.role, m.author, m.content,
           m.created_at AS occurred_at, m.channel, failed.error_code, failed.error_message, m.tool_calls,
           m.tool_call_id, m.model, m.usage, m.stop_reason, m.turn_id AS turn, t.agent,
           CASE WHEN t.status = 'cancelled' THEN t.status END AS status,
           CASE WHEN t.reply_seq = m.seq THEN t.feedback END AS feedback,
           coalesce(t.additions -> 'remember' = 'false', false) AS is_left_out,
           coalesce((SELECT true FROM forgotten_messages AS f
                     WHERE f.session_id = m.session_id AND f.seq = m.seq), false) AS is_forgotten
    FROM messages AS m JOIN sessions AS s USING (session_id) {WITH_FAILURE}
    LEFT JOIN LATERAL (
        SELECT agent, status, settled_at, reply_seq, feedback, additions FROM turns
        WHERE turn_id = m.turn_id LIMIT 1) AS t ON true
    WHERE (m.session_id, m.seq) > (%(after_session)s::uuid, %(after_seq)s::bigint)
      AND (m.role = 'user' OR t.settled_at IS NOT NULL)
      AND (m.role = 'tool' OR m.tool_calls IS NOT NULL OR m.content ~ '[^[:space:]]')
      AND (s.forked_from IS NULL OR m.created_at >= s.created_at) AND s.depth = 0
"""  # noqa: S608 (constants)

# A page of messages, ordered by session id and `seq`. The messages that a fork copied are omitted, because the export
# of the original session contains them. So is what agents say to each other: an import would make it the user's. Of a
# turn that is not settled, only the user's messages are exported, because its calls may have no results yet.
EXPORT = Statement("exchange.export", _MESSAGES + " ORDER BY m.session_id, m.seq LIMIT %(most)s", writes=False)

EXPORT_OF_SESSIONS = Statement(
    "exchange.export_of_sessions",
    _MESSAGES
    + """
      AND m.session_id = ANY (%(session_ids)s::uuid[])
    ORDER BY m.session_id, m.seq LIMIT %(most)s
    """,
    writes=False,
)

SESSIONS_OF_USER = Statement(
    "exchange.sessions_of_user",
    "SELECT session_id FROM sessions WHERE user_id = %(user_id)s ORDER BY session_id",
    writes=False,
)

SESSIONS_OF_TENANT = Statement(
    "exchange.sessions_of_tenant",
    f"SELECT session_id FROM sessions WHERE {OF_TENANT.format(column='user_id')} ORDER BY session_id",  # noqa: S608
    writes=False,
)
