"""The SQL statements that open, find, read, end and fork sessions."""

from __future__ import annotations

from perdure.access.tenants import OF_TENANT
from perdure.database.engine import Statement
from perdure.database.failures import REMEMBERED, SPOKEN, WITH_FAILURE
from perdure.database.fencing import HELD, RAISED, UNLEASED
from perdure.database.keyed import keyed
from perdure.database.paging import sized
from perdure.sessions.states import State, Trigger, sql

# Opens the live session of a scope. Of the scope's earlier sessions that have no successor, the newest becomes the
# predecessor. Therefore the chain of sessions has no gap even if the clock was set back. Inserts no session if a
# concurrent transaction opened one. Also creates or restores the scope's conversation. This locks the conversation, so
# that the session has the setting `remember` of a concurrent CHANGE_CONVERSATION. Returns the new session as
# LOCK_TARGET returns an open one.
OPEN = Statement(
    "sessions.open",
    f"""
    WITH known AS (
        INSERT INTO users (user_id, created_at) VALUES (%(user_id)s, perdure_now())
        ON CONFLICT DO NOTHING
    ), named AS (
        INSERT INTO conversations (user_id, conversation, title, created_at)
        SELECT %(user_id)s, %(conversation)s::text, %(title)s, perdure_now() WHERE %(conversation)s::text IS NOT NULL
        ON CONFLICT (user_id, conversation) DO UPDATE SET archived_at = NULL
        RETURNING remember
    )
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          remember, previous_session_id)
    VALUES (%(session_id)s, %(user_id)s, %(scope)s, true, %(agent)s, '{State.INITIALIZING}', perdure_now(),
            perdure_now(), ARRAY[%(channel)s],
            coalesce((SELECT remember FROM named), true),
            (SELECT s.session_id FROM sessions AS s
             WHERE s.user_id = %(user_id)s AND s.scope = %(scope)s AND s.end_requested_at IS NOT NULL
               AND s.forked_from IS NULL
               AND NOT EXISTS (SELECT FROM sessions AS n WHERE n.previous_session_id = s.session_id)
             ORDER BY s.created_at DESC LIMIT 1))
    ON CONFLICT (user_id, scope) WHERE routable DO NOTHING
    RETURNING session_id, unsettled, false AS over, false AS idle
    """,
)

# Opens a copy of a session from another installation, with the same id and tick. The user's next messages are routed to
# this session, unless the user already has a live session in this installation. A conversation that is left out of
# memory in either installation stays left out.
OPEN_RESTORED = Statement(
    "sessions.open_restored",
    f"""
    WITH unknown AS (
        SELECT WHERE NOT EXISTS (SELECT FROM sessions WHERE session_id = %(session_id)s::uuid)
    ), known AS (
        INSERT INTO users (user_id, created_at) SELECT %(user_id)s::text, perdure_now() FROM unknown
        ON CONFLICT DO NOTHING
    ), named AS (
        INSERT INTO conversations AS c (user_id, conversation, title, remember, created_at)
        SELECT %(user_id)s, %(conversation)s::text, %(title)s, %(remember)s, perdure_now()
        FROM unknown WHERE %(conversation)s::text IS NOT NULL
        ON CONFLICT (user_id, conversation) DO UPDATE
        SET archived_at = NULL, remember = c.remember AND excluded.remember
        RETURNING remember
    )
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          remember, tick)
    SELECT %(session_id)s::uuid, %(user_id)s, %(scope)s,
           NOT EXISTS (SELECT FROM sessions WHERE user_id = %(user_id)s AND scope = %(scope)s AND routable),
           %(agent)s, {sql(Trigger.SESSION_CREATED, column=f"'{State.INITIALIZING}'")}, perdure_now(), perdure_now(),
           ARRAY[%(channel)s], coalesce((SELECT remember FROM named), true), %(tick)s::bigint
    FROM unknown
    ON CONFLICT DO NOTHING
    """,
)

# Locks a message's session until the transaction ends. Because of the subquery, PostgreSQL looks up the session by
# primary key, with or without the parameter `session_id`. A condition with OR would read every session of the user.
LOCK_TARGET = Statement(
    "sessions.lock_target",
    """
    SELECT session_id, unsettled, end_requested_at IS NOT NULL AS over,
           routable AND unsettled = 0
             AND last_activity_at <= perdure_now() - make_interval(secs => %(idle_s)s) AS idle
    FROM sessions
    WHERE session_id = coalesce(
            %(session_id)s::uuid,
            (SELECT session_id FROM sessions WHERE user_id = %(user_id)s AND scope = %(scope)s AND routable))
      AND user_id = %(user_id)s AND depth = 0
      AND (%(session_id)s::uuid IS NOT NULL OR routable)
    FOR NO KEY UPDATE
    """,
)

OWNER = Statement("sessions.owner", "SELECT user_id FROM sessions WHERE session_id = %(session_id)s", writes=False)

# The session to which a message without a `session_id` would go.
LIVE = Statement(
    "sessions.live",
    """
    SELECT session_id, message_count FROM sessions
    WHERE user_id = %(user_id)s AND scope = %(scope)s AND routable
      AND (unsettled > 0 OR last_activity_at > perdure_now() - make_interval(secs => %(idle_s)s))
    """,
    writes=False,
)

# The members of a session's body.
_SESSION = """
    SELECT session_id, user_id, agent, state, turn_count, unsettled, message_count, created_at, last_activity_at,
           ended_at, channels, CASE WHEN starts_with(scope, '/') THEN substr(scope, 2) END AS conversation,
           CASE WHEN starts_with(scope, '/') THEN (
                SELECT title FROM conversations AS c
                WHERE c.user_id = sessions.user_id AND c.conversation = substr(sessions.scope, 2)) END AS title,
           summary, CASE WHEN summary_extractive AND summary <> '' THEN 'extractive'
                         WHEN summary <> '' THEN 'model' END AS summary_kind,
           key_topics,
           CASE WHEN depth > 0 THEN (
                SELECT turn_id FROM tool_effects WHERE effect_id = sessions.session_id) END AS parent_turn_id,
           CASE WHEN ended_at IS NOT NULL THEN json_build_object(
                'status', CASE WHEN consolidated_at IS NOT NULL
                               THEN CASE WHEN consolidation ? 'skipped' THEN 'skipped' ELSE 'done' END
                               WHEN consolidation_given_up_at IS NOT NULL THEN 'given_up' ELSE 'waiting' END,
                'runs', consolidation_attempts, 'error', consolidation_error) END AS consolidation
    FROM sessions
"""


def _list(name: str, where: str, newest: str = "created_at") -> Statement:
    """A statement that lists sessions, at most `limit`: those with the newest time in the column `newest` first.

    One statement for each way to list: the generic plan of a prepared statement cannot use an index for a condition
    such as `$1 IS NULL OR user_id = $1`.
    """
    order = f"ORDER BY {newest} DESC, session_id DESC LIMIT %(limit)s"
    return Statement(f"sessions.{name}", f"{_SESSION} WHERE {where} {order}", writes=False)


LIST = _list("list", "true")

LIST_OF_USER = _list("list_of_user", "user_id = %(user_id)s")

# Without the sessions in which agents answer each other.
LIST_FOR_USER = _list("list_for_user", "user_id = %(user_id)s AND depth = 0")

LIST_OF_SCOPE = _list("list_of_scope", "user_id = %(user_id)s AND scope = %(scope)s")

LIST_OF_TENANT = _list("list_of_tenant", OF_TENANT.format(column="user_id"))

_GIVEN_UP = "consolidation_given_up_at IS NOT NULL"

LIST_GIVEN_UP = _list("list_given_up", _GIVEN_UP, "consolidation_given_up_at")

LIST_GIVEN_UP_OF_USER = _list(
    "list_given_up_of_user", f"{_GIVEN_UP} AND user_id = %(user_id)s", "consolidation_given_up_at"
)

LIST_GIVEN_UP_OF_TENANT = _list(
    "list_given_up_of_tenant", f"{_GIVEN_UP} AND {OF_TENANT.format(column='user_id')}", "consolidation_given_up_at"
)

READ = Statement("sessions.read", _SESSION + " WHERE session_id = %(session_id)s", writes=False)

# --- conversations ----------------------------------------------------------------------

# The members of a conversation's body. `session_id` is the conversation's live session. A fork of a session does not
# belong to the conversation.
_CONVERSATION = """
    SELECT c.user_id, c.conversation, c.title, c.archived_at IS NOT NULL AS archived, c.remember,
           CASE WHEN newest.live THEN newest.session_id END AS session_id,
           CASE WHEN newest.live AND newest.unsettled > 0 THEN ARRAY(
               SELECT turn_id FROM turns WHERE session_id = newest.session_id AND settled_at IS NULL
               ORDER BY seq LIMIT 20) ELSE '{}' END AS unsettled_turns,
           c.created_at, coalesce(newest.last_activity_at, c.created_at) AS last_activity_at
    FROM conversations AS c LEFT JOIN LATERAL (
        SELECT session_id, routable AND end_requested_at IS NULL AS live, last_activity_at, unsettled FROM sessions
        WHERE user_id = c.user_id AND scope = '/' || c.conversation AND forked_from IS NULL
        ORDER BY created_at DESC, session_id DESC LIMIT 1) AS newest ON true
    WHERE c.user_id = %(user_id)s
"""

CONVERSATIONS = Statement(
    "sessions.conversations",
    _CONVERSATION
    + """
      AND (%(archived)s::boolean IS NULL OR (c.archived_at IS NOT NULL) = %(archived)s::boolean)
    ORDER BY last_activity_at DESC, c.conversation LIMIT %(limit)s
    """,
    writes=False,
)

CONVERSATION = Statement(
    "sessions.conversation", _CONVERSATION + " AND c.conversation = %(conversation)s", writes=False
)

CHANGE_CONVERSATION = Statement(
    "sessions.change_conversation",
    """
    UPDATE conversations
    SET title = coalesce(%(title)s::text, title), titled = titled OR %(title)s::text IS NOT NULL,
        archived_at = CASE %(archived)s::boolean WHEN true THEN coalesce(archived_at, perdure_now())
                                                 WHEN false THEN NULL ELSE archived_at END,
        remember = coalesce(%(remember)s::boolean, remember)
    WHERE user_id = %(user_id)s AND conversation = %(conversation)s
    RETURNING conversation
    """,
)

# Says of a conversation's sessions whether they are remembered. Locks them, so that no message is accepted meanwhile.
# Runs before CHANGE_CONVERSATION, because accepting a message locks the session first. Runs after it, too, for the
# sessions that were opened or forked before it had locked the conversation.
MARK_SESSIONS = Statement(
    "sessions.mark_remember",
    """
    UPDATE sessions SET remember = %(remember)s
    WHERE user_id = %(user_id)s AND scope = '/' || %(conversation)s AND remember <> %(remember)s
    """,
)

# Marks the turns of a conversation, so that none of it is remembered, and removes its messages from recall.
LEAVE_OUT = Statement(
    "sessions.leave_out",
    """
    WITH own AS MATERIALIZED (
        SELECT session_id FROM sessions WHERE user_id = %(user_id)s AND scope = '/' || %(conversation)s
    ), marked AS (
        UPDATE turns SET additions = coalesce(additions, '{}') || '{"remember": false}'
        WHERE session_id IN (SELECT session_id FROM own) AND additions -> 'remember' IS DISTINCT FROM 'false'
    ), unembedded AS (
        DELETE FROM unembedded WHERE kind = 'message' AND id IN (SELECT session_id FROM own)
    )
    DELETE FROM message_words WHERE session_id IN (SELECT session_id FROM own)
    """,
)

# Archives the cases that were learnt from a conversation. Runs after LEAVE_OUT, which waits for concurrent feedback.
ARCHIVE_CASES = Statement(
    "sessions.archive_cases",
    """
    WITH learnt AS (
        SELECT c.* FROM sessions AS s JOIN turns AS t USING (session_id) JOIN cases AS c ON c.turn_id = t.turn_id
        WHERE s.user_id = %(user_id)s AND s.scope = '/' || %(conversation)s AND c.status = 'active'
        FOR NO KEY UPDATE OF c
    ), kept AS (
        INSERT INTO case_archive (case_id, query, response_text, category_path, query_vector, embedder, usage_count,
                                  success_rate, last_accessed_at, created_at, user_id, turn_id, review, archived_at,
                                  archived_reason)
        SELECT case_id, query, response_text, category_path, query_vector, embedder, usage_count, success_rate,
               last_accessed_at, created_at, user_id, turn_id, review, perdure_now(), %(reason)s
        FROM learnt
    ), recorded AS (
        INSERT INTO case_history (case_id, event, reason, at)
        SELECT case_id, 'archived', %(reason)s, perdure_now() FROM learnt
    )
    UPDATE cases AS c SET status = 'archived' FROM learnt WHERE c.case_id = learnt.case_id
    """,
)

# --- messages ----------------------------------------------------------------------------

# The state of the questions to the user (`ask_user`) among the calls of a message, by the call's position.
QUESTIONS = """
    CASE WHEN m.tool_calls IS NOT NULL THEN (
        SELECT jsonb_object_agg(e.position, CASE e.status WHEN 'intended' THEN 'open' WHEN 'done' THEN 'answered'
                                                          ELSE 'unanswered' END)
        FROM tool_effects AS e
        WHERE e.turn_id = m.turn_id AND e.message_seq = m.seq AND e.waits_for = 'user') END AS questions
""".strip()

# The unsettled turns of a session with their messages, which the transcript has only after a turn's first commit. All
# messages to one turn, also those that were merged into it or answer its questions, are one text.
QUEUE = Statement(
    "sessions.queue",
    """
    SELECT t.turn_id, t.seq, t.status, t.attempts, t.channel, t.accepted_at, said.message_id, said.text, said.parts
    FROM (SELECT * FROM turns WHERE session_id = %(session_id)s AND settled_at IS NULL
          ORDER BY seq LIMIT %(limit)s) AS t
    CROSS JOIN LATERAL (
        SELECT min(i.message_id) FILTER (WHERE i.position = 1) AS message_id,
               coalesce(string_agg(nullif(i.text, ''), E'\\n\\n' ORDER BY i.position), '') AS text,
               (SELECT jsonb_agg(part ORDER BY p.position, n) FROM inbox AS p,
                       jsonb_array_elements(p.parts) WITH ORDINALITY AS each (part, n)
                WHERE p.turn_id = t.turn_id AND p.parts IS NOT NULL) AS parts
        FROM inbox AS i WHERE i.turn_id = t.turn_id) AS said
    ORDER BY t.seq
    """,
    writes=False,
)

MESSAGES = Statement(
    "sessions.messages",
    sized(
        f"""
        SELECT m.seq, m.turn_id, m.role, m.content, m.tool_calls, m.tool_call_id, m.message_id, m.channel,
               m.token_count, m.model, m.fallback, m.stop_reason, m.parts, m.created_at, failed.error_code,
               failed.error_message, {QUESTIONS}
        FROM messages AS m {WITH_FAILURE}
        WHERE m.session_id = %(session_id)s AND m.seq > %(after)s
        ORDER BY m.seq LIMIT %(most)s
        """,
        order="seq",
        size="octet_length(content) + coalesce(octet_length(tool_calls::text), 0)",
    ),
    writes=False,
)

# --- ending ------------------------------------------------------------------------------

# Whether a turn of the session waits for a person, a task or a time. Reads only columns of the locked session row, so
# that a turn that is parked concurrently is not missed.
_WAITS = """
    lease_until IS NULL AND not_before IS NOT NULL AND NOT paced AND queued_at IS NULL AND unsettled > 0 AS waits
""".strip()

# A request to end a session denies the session's undecided approvals, and the turn that waits for them continues. If
# the session has no unsettled turn, its end is due in the sweeper's next round.
_DENY_APPROVALS = f"""
        state = CASE s.state WHEN '{State.WAITING_APPROVAL}' THEN {sql(Trigger.APPROVAL_DECIDED, column="s.state")}
                             ELSE s.state END,
        not_before = CASE WHEN s.state = '{State.WAITING_APPROVAL}' THEN NULL WHEN found.waits THEN perdure_now()
                          ELSE s.not_before END,
        woken_at = CASE WHEN s.state = '{State.WAITING_APPROVAL}' OR s.unsettled = 0 AND s.end_requested_at IS NULL
                        THEN NULL ELSE s.woken_at END,
        wakes = CASE WHEN s.unsettled = 0 AND s.end_requested_at IS NULL THEN 0 ELSE s.wakes END
""".strip()

# The priority of the turn whose wait the request ended; NULL if no turn waited.
_FREED = f"""
    CASE WHEN found.state = '{State.WAITING_APPROVAL}' OR found.waits THEN (
        SELECT t.priority FROM turns AS t
        WHERE t.session_id = s.session_id AND t.settled_at IS NULL ORDER BY t.seq LIMIT 1) END AS freed
""".strip()

# Requests the end of sessions: no further message is routed to them. Only the first request sets the reason. Locks the
# sessions in the order of their ids, so that two concurrent requests do not wait for each other.
REQUEST_END = Statement(
    "sessions.request_end",
    f"""
    WITH found AS (
        SELECT session_id, state, {_WAITS} FROM sessions
        WHERE session_id = ANY (%(session_ids)s::uuid[]) AND ended_at IS NULL
        ORDER BY session_id
        FOR NO KEY UPDATE
    )
    UPDATE sessions AS s
    SET end_requested_at = coalesce(end_requested_at, perdure_now()), end_reason = coalesce(end_reason, %(reason)s),
        routable = false,
        {_DENY_APPROVALS}
    FROM found WHERE s.session_id = found.session_id
    RETURNING s.session_id, s.unsettled = 0 AS may_end, {_FREED}
    """,
)

# Requests the end of a session whose user leaves a channel. Changes nothing if the session has, on another channel, an
# unsettled turn or a turn that was settled in the last `idle_s` seconds.
LEAVE = Statement(
    "sessions.leave",
    f"""
    WITH found AS (
        SELECT session_id, state, {_WAITS} FROM sessions
        WHERE session_id = %(session_id)s AND {keyed("end_requested_at IS NULL")}
        FOR NO KEY UPDATE
    )
    UPDATE sessions AS s
    SET end_requested_at = perdure_now(), end_reason = %(reason)s, routable = false,
        {_DENY_APPROVALS}
    FROM found
    WHERE s.session_id = found.session_id
      AND NOT EXISTS (
            SELECT FROM turns AS t
            WHERE t.session_id = s.session_id AND t.channel <> %(channel)s
              AND (t.settled_at IS NULL OR t.settled_at > perdure_now() - make_interval(secs => %(idle_s)s)))
    RETURNING s.unsettled = 0 AS may_end, {_FREED}
    """,
)

# Sets `last_activity_at` to the present time if it is in the future: it was written while the server's clock was ahead.
# A difference of up to a second is ignored, because concurrent transactions normally cause it.
COUNT_FROM_NOW = Statement(
    "sessions.count_from_now",
    """
    WITH ahead AS (
        SELECT session_id FROM sessions
        WHERE end_requested_at IS NULL AND last_activity_at > perdure_now() + interval '1 second'
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE sessions AS s SET last_activity_at = perdure_now()
    WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM ahead))
    RETURNING s.session_id
    """,
)

# Requests the end of idle sessions, forks included, the longest idle first. `sessions_idle_idx` has the sessions by
# their last activity. Sessions with unsettled turns are in the index, too, but few of them are that old.
EXPIRE_IDLE = Statement(
    "sessions.expire_idle",
    """
    WITH idle AS (
        SELECT session_id FROM sessions
        WHERE end_requested_at IS NULL AND unsettled = 0
          AND last_activity_at <= perdure_now() - make_interval(secs => %(idle_s)s)
        ORDER BY last_activity_at LIMIT (SELECT %(most)s::bigint)
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE sessions AS s
    SET end_requested_at = perdure_now(), end_reason = %(reason)s, routable = false,
        woken_at = NULL, wakes = 0
    WHERE s.session_id = ANY (ARRAY(SELECT session_id FROM idle))
    RETURNING s.session_id
    """,
)

# Claims a session whose end was requested and that has no unsettled turn.
CLAIM_ENDING = Statement(
    "sessions.claim_ending",
    f"""
    WITH candidate AS (
        SELECT session_id FROM sessions
        WHERE session_id = %(session_id)s AND {UNLEASED}
          AND {keyed("end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0")}
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE sessions AS s
    SET {RAISED}, lease_owner = %(owner)s, end_attempts = s.end_attempts + 1,
        wakes = 0,
        lease_until = perdure_now() + make_interval(secs => %(lease_s)s),
        state = {sql(Trigger.END_DUE, column="s.state")}
    FROM candidate WHERE s.session_id = candidate.session_id
    RETURNING s.token, s.nonce, s.state, s.end_attempts, s.depth > 0 AS answers_call
    """,
)

# Releases the session after an attempt to end it. The sweeper tries again after a backoff. A `forgiven` attempt is not
# counted, and the sweeper tries again in its next round.
RELEASE_ENDING = Statement(
    "sessions.release_ending",
    f"""
    UPDATE sessions
    SET lease_until = NULL, lease_owner = NULL,
        end_attempts = end_attempts - CASE WHEN %(forgiven)s THEN 1 ELSE 0 END,
        woken_at = CASE WHEN NOT %(forgiven)s THEN perdure_now() END,
        wakes = CASE WHEN %(forgiven)s THEN 0 ELSE greatest(end_attempts - 1, 0) END
    WHERE {HELD}
    RETURNING session_id
    """,
)

SAVE_SUMMARY = Statement(
    "sessions.save_summary",
    f"""
    WITH saved AS (
        UPDATE sessions
        SET summary = %(summary)s, key_topics = %(key_topics)s::text[], summary_extractive = %(extractive)s,
            state = {sql(Trigger.SUMMARY_SAVED)}
        WHERE {HELD}
        RETURNING session_id, user_id, scope, forked_from
    ), titled AS (
        UPDATE conversations AS c SET title = %(title)s
        FROM saved
        WHERE c.user_id = saved.user_id AND '/' || c.conversation = saved.scope AND saved.forked_from IS NULL
          AND NOT c.titled AND NOT %(extractive)s AND %(title)s <> ''
    )
    SELECT session_id FROM saved
    """,
)

# What agents say to each other is not consolidated: none of it is the user's.
FINISH_ENDING = Statement(
    "sessions.finish_ending",
    f"""
    UPDATE sessions
    SET ended_at = perdure_now(), lease_until = NULL, lease_owner = NULL, woken_at = NULL,
        consolidated_at = CASE WHEN depth > 0 THEN perdure_now() ELSE consolidated_at END,
        consolidation = CASE WHEN depth > 0 THEN '{{"skipped": true}}'::jsonb ELSE consolidation END,
        state = {sql(Trigger.CLEANED_UP)}
    WHERE {HELD}
    RETURNING session_id
    """,
)

# Finds sessions whose end was requested, without an unsettled turn or a valid lease, and records a wake-up for each. As
# in `turns.queries.WAKE_DUE`, the pause before a session's next wake-up doubles each time, and sessions with fewer
# wake-ups come first. For each number of wake-ups (`level`, at most 6), the query reads at most `most` rows from one
# range of `sessions_ending_wake_idx`.
ENDINGS_DUE = Statement(
    "sessions.endings_due",
    f"""
    WITH due AS (
        SELECT found.session_id, found.wakes, found.since
        FROM generate_series(0, 6) AS level, LATERAL (
            (SELECT session_id, wakes, coalesce(woken_at, '-infinity') AS since FROM sessions
             WHERE end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0 AND least(wakes, 6) = level
               AND coalesce(woken_at, '-infinity')
                   <= perdure_now() - make_interval(secs => %(backoff_s)s * 2 ^ level)
               AND {UNLEASED}
             ORDER BY coalesce(woken_at, '-infinity') LIMIT (SELECT %(most)s::bigint))
            UNION ALL
            (SELECT session_id, wakes, '-infinity' FROM sessions
             WHERE end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0 AND least(wakes, 6) = level
               AND coalesce(woken_at, '-infinity') > perdure_now() + interval '1 second'
               AND {UNLEASED}
             ORDER BY coalesce(woken_at, '-infinity') LIMIT (SELECT %(most)s::bigint))) AS found
        ORDER BY found.wakes, found.since
        LIMIT %(most)s
    ), locked AS (
        SELECT session_id FROM sessions WHERE session_id = ANY (ARRAY(SELECT session_id FROM due))
        FOR NO KEY UPDATE SKIP LOCKED
    ), marked AS (
        UPDATE sessions SET woken_at = perdure_now(), wakes = wakes + 1
        WHERE session_id = ANY (ARRAY(SELECT session_id FROM locked))
        RETURNING session_id
    )
    SELECT session_id FROM due JOIN marked USING (session_id) ORDER BY due.wakes, since
    """,
)

# For summaries: without the replies of failed turns, and turns of which nothing may be remembered.
NEWEST_MESSAGES = Statement(
    "sessions.newest_messages",
    f"""
    SELECT m.seq, m.role, m.content FROM messages AS m
    WHERE m.session_id = %(session_id)s AND {SPOKEN} AND {REMEMBERED}
    ORDER BY m.seq DESC LIMIT %(most)s
    """,
    writes=False,
)

# --- forking -----------------------------------------------------------------------------

# The turns to copy, in order: those that had begun and were settled at or before the tick. A turn that was cancelled
# before it began has no messages, so it is not copied.
PLAN_FORK = Statement(
    "sessions.plan_fork",
    """
    SELECT s.tick, s.depth > 0 AS answers_call,
           (SELECT count(*) FROM sessions
            WHERE user_id = s.user_id AND forked_from IS NOT NULL AND ended_at IS NULL) AS open_forks,
           (SELECT min(settled_tick) FROM turns
            WHERE session_id = s.session_id AND first_seq IS NOT NULL AND settled_at IS NOT NULL) AS first_tick,
           ARRAY(SELECT turn_id FROM turns
                 WHERE session_id = s.session_id AND first_seq IS NOT NULL
                   AND settled_at IS NOT NULL AND settled_tick <= coalesce(%(tick)s::bigint, s.tick)
                 ORDER BY seq) AS turn_ids
    FROM sessions AS s WHERE s.session_id = %(session_id)s
    """,
    writes=False,
)

# Writes a fork: the session, the turns under new ids, the turns' messages, and the working variables. The copied turns
# keep their ticks, so that a fork can be forked at the same ticks as its source. What is not to be remembered of the
# source is not to be remembered of the fork; the conversation is locked as in OPEN. A person's feedback stays with the
# source. If later turns are not copied, the agent is that of the last turn copied: a later turn may have handed the
# conversation over.
FORK = Statement(
    "sessions.fork",
    f"""
    WITH named AS (
        SELECT c.remember FROM sessions AS s
        JOIN conversations AS c ON c.user_id = s.user_id AND c.conversation = substr(s.scope, 2)
        WHERE s.session_id = %(session_id)s AND starts_with(s.scope, '/')
        FOR SHARE OF c
    ), copied AS (
        SELECT t.*, new.turn_id AS new_turn_id, new.position
        FROM unnest(%(turn_ids)s::uuid[], %(new_turn_ids)s::uuid[])
                 WITH ORDINALITY AS new (old_turn_id, turn_id, position)
        JOIN turns AS t ON t.turn_id = new.old_turn_id
    ), said AS (
        INSERT INTO messages (session_id, seq, turn_id, role, content, tool_calls, tool_call_id, message_id, channel,
                              token_count, model, fallback, usage, stop_reason, opaque, parts, created_at)
        SELECT %(fork_id)s::uuid, m.seq, copied.new_turn_id, m.role, m.content, m.tool_calls, m.tool_call_id,
               m.message_id, m.channel, m.token_count, m.model, m.fallback, m.usage, m.stop_reason,
               m.opaque, m.parts, m.created_at
        FROM messages AS m JOIN copied USING (turn_id)
        WHERE m.session_id = %(session_id)s
        RETURNING seq
    ), done AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, metadata, status, attempts,
                           steps, first_seq, reply_seq, error_code, error_message, usage, cancel_requested_at,
                           instructions, tools_left_out, data, fingerprint, additions, accepted_at, started_at,
                           settled_at, settled_tick)
        SELECT new_turn_id, %(fork_id)s::uuid, position, user_id, agent, channel, priority, metadata, status, attempts,
               steps, first_seq, reply_seq, error_code, error_message, usage, cancel_requested_at, instructions,
               tools_left_out, data, fingerprint,
               CASE WHEN additions -> 'remember' = 'false' OR NOT (SELECT remember FROM named)
                    THEN '{{"remember": false}}'::jsonb END,
               accepted_at, started_at, settled_at, settled_tick
        FROM copied
        RETURNING settled_tick
    ), kept AS (
        INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)
        SELECT %(fork_id)s::uuid, false, variables, '[]', tick, 0, saved_at
        FROM snapshots
        WHERE session_id = %(session_id)s AND NOT set_aside AND tick <= (SELECT max(settled_tick) FROM done)
    ), summarised AS (
        INSERT INTO running_summaries (session_id, from_seq, to_seq, summary, extractive)
        SELECT %(fork_id)s::uuid, from_seq, to_seq, summary, extractive FROM running_summaries
        WHERE session_id = %(session_id)s AND to_seq <= (SELECT count(*) FROM said)
    )
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          turn_count, message_count, last_turn_seq, tick, variables_tick, previous_session_id,
                          forked_from, remember)
    SELECT %(fork_id)s::uuid, s.user_id, s.scope, false,
           CASE WHEN EXISTS (SELECT FROM turns AS later
                             WHERE later.session_id = s.session_id AND later.first_seq IS NOT NULL
                               AND later.seq > (SELECT max(seq) FROM copied))
                THEN (SELECT agent FROM copied ORDER BY position DESC LIMIT 1) ELSE s.agent END,
           {sql(Trigger.SESSION_CREATED, column=f"'{State.INITIALIZING}'")}, perdure_now(), perdure_now(),
           ARRAY(SELECT channel FROM copied GROUP BY channel ORDER BY min(position)),
           (SELECT count(*) FROM done), (SELECT count(*) FROM said), (SELECT count(*) FROM done),
           (SELECT max(settled_tick) FROM done),
           (SELECT CASE WHEN NOT set_aside THEN tick END FROM snapshots
            WHERE session_id = s.session_id AND tick <= (SELECT max(settled_tick) FROM done)
            ORDER BY tick DESC, set_aside LIMIT 1),
           s.previous_session_id, s.session_id, coalesce((SELECT remember FROM named), s.remember)
    FROM sessions AS s WHERE s.session_id = %(session_id)s
    RETURNING session_id
    """,
)
