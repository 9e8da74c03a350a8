"""The statements on the table `snapshots`, and SQL fragments for the statements that commit a step.

Each step that changes a working variable appends a row with all variables and the step's tick. The variables are valid
until the tick of the next row, so a fork can read the variables of any tick. `sessions.variables_tick` is the tick of
the row with the session's present variables. It is NULL if the session has no present variables. Each writer locks the
session's row in `sessions`, so the writers of one session run one after another.
"""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.failures import SPOKEN
from perdure.database.fencing import HELD, RAISED, UNLEASED
from perdure.database.keyed import keyed

# Two fragments of a statement that commits a step. NEXT_VARIABLES_TICK is the new value of `sessions.variables_tick`.
# WITH_STEP is a CTE that inserts a row into `snapshots`. It reads the CTE `fenced`, which updates the session's row and
# returns session_id, token and tick. `%(variables)s` is the JSON of `checked_variables`, or NULL if the step changed no
# variable. For NULL, WITH_STEP inserts no row.
NEXT_VARIABLES_TICK = "CASE WHEN %(variables)s::json IS NULL THEN variables_tick ELSE tick + 1 END"

WITH_STEP = """
    kept AS (
        INSERT INTO snapshots AS k (session_id, set_aside, variables, events, tick, token, saved_at)
        SELECT session_id, false, %(variables)s::json, '[]', tick, token, perdure_now()
        FROM fenced
        WHERE %(variables)s::json IS NOT NULL
        ON CONFLICT (session_id, set_aside, tick) DO UPDATE
        SET variables = excluded.variables, token = excluded.token, saved_at = excluded.saved_at
    )
"""


def pending(session_id: str, most: str = "ALL") -> str:
    """An SQL expression for a JSON array of the session's oldest pending messages, at most `most` of them.

    A message is pending until its turn begins. `left_out`: the session's conversation is left out of memory.
    `session_id` and `most` are SQL expressions.
    """
    return f"""
           (SELECT coalesce(json_agg(queued ORDER BY queued.seq, queued.position), '[]')
            FROM (SELECT i.channel, i.user_id, i.message_id, i.text, i.parts, t.agent, t.priority, t.reply_to,
                         t.metadata, t.additions,
                         CASE WHEN i.position > 1 THEN true END AS merged,
                         CASE WHEN starts_with(o.scope, '/') THEN substr(o.scope, 2) END AS conversation,
                         CASE WHEN NOT o.remember THEN true END AS left_out, t.seq, i.position
                  FROM turns AS t JOIN inbox AS i USING (turn_id) JOIN sessions AS o USING (session_id)
                  WHERE t.session_id = {session_id} AND t.settled_at IS NULL AND t.status = 'accepted'
                  ORDER BY t.seq, i.position LIMIT {most}) AS queued)
    """.strip()  # noqa: S608 (constants)


# An expression for the present variables of a session. `{held}` is the CTE or table with the session's row. The
# surrounding statement reads `variables_tick` from the newest version of the session's row, which it has locked. But it
# reads `snapshots` as of the statement's start, so the row of that tick may not be visible yet. In that case, the
# result is NULL, and never the variables of an older row.
PRESENT_VARIABLES = """
    (SELECT k.variables::text FROM snapshots AS k
     WHERE k.session_id = {held}.session_id AND NOT k.set_aside AND k.tick = {held}.variables_tick)
""".strip()

LOCK_SESSION = Statement(
    "snapshots.lock_session",
    "SELECT token, tick FROM sessions WHERE session_id = %(session_id)s FOR NO KEY UPDATE",
)

KEPT = Statement(
    "snapshots.kept",
    """
    SELECT k.token, k.tick, k.variables::text AS variables, k.events::text AS events
    FROM sessions AS s JOIN snapshots AS k ON k.session_id = s.session_id AND k.tick = s.variables_tick
    WHERE s.session_id = %(session_id)s AND NOT k.set_aside
    """,
    writes=False,
)

# Runs after LOCK_SESSION in the same transaction. Deletes rows of later ticks: a worker that lost the session wrote
# them. Also sets `saved_token` and `saved_tick`: the engine then uses no snapshot of another version from an external
# store.
SAVE = Statement(
    "snapshots.save",
    """
    WITH present AS (
        UPDATE sessions
        SET variables_tick = %(tick)s::bigint, saved_token = %(token)s::bigint, saved_tick = %(tick)s::bigint
        WHERE session_id = %(session_id)s
    ), later AS (
        DELETE FROM snapshots WHERE session_id = %(session_id)s AND NOT set_aside AND tick > %(tick)s::bigint
    )
    INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)
    VALUES (%(session_id)s, false, %(variables)s::json, %(events)s::json, %(tick)s::bigint, %(token)s::bigint,
            to_timestamp(%(timestamp)s::bigint / 1000.0))
    ON CONFLICT (session_id, set_aside, tick) DO UPDATE
    SET variables = excluded.variables, events = excluded.events, token = excluded.token, saved_at = excluded.saved_at
    """,
)

# Assembles a snapshot from the stored variables, the session's row, the messages of the last turns without the replies
# of failed turns, and the queue.
# `committed_since`: the session has committed since the variables were stored, so the events stored with the variables
# are outdated.
_PARTS = f"""
    SELECT s.state, coalesce(k.variables::text, '{{{{}}}}') AS variables, coalesce(k.events::text, '[]') AS events,
           coalesce(k.tick < s.tick, false) AS committed_since, {pending("s.session_id")} AS pending,
           (extract(epoch FROM coalesce(k.saved_at, s.last_activity_at)) * 1000)::bigint AS timestamp,
           CASE WHEN k.tick IS NULL OR (s.token, s.tick) > (k.token, k.tick) THEN s.token ELSE k.token END AS token,
           CASE WHEN k.tick IS NULL OR (s.token, s.tick) > (k.token, k.tick) THEN s.tick ELSE k.tick END AS tick,
           (SELECT coalesce(json_agg(json_build_object('role', m.role, 'content', m.content,
                                     'tool_calls', m.tool_calls, 'tool_call_id', m.tool_call_id) ORDER BY m.seq), '[]')
            FROM messages AS m
            WHERE m.session_id = s.session_id AND m.seq >= (
                SELECT min(first_seq) FROM (
                    SELECT first_seq FROM turns
                    WHERE session_id = s.session_id AND first_seq IS NOT NULL
                    ORDER BY seq DESC LIMIT %(history_turns)s) AS recent)
              AND {SPOKEN}) AS history
    FROM sessions AS s {{join}} snapshots AS k
      ON k.session_id = s.session_id AND k.tick = s.variables_tick AND NOT k.set_aside
    WHERE s.session_id = %(session_id)s
"""  # noqa: S608 (constants)

LOAD = Statement("snapshots.load", _PARTS.format(join="JOIN"), writes=False)

# Like LOAD, but also returns a row for a session without variables.
PRESENT = Statement("snapshots.present", _PARTS.format(join="LEFT JOIN"), writes=False)

FORGET_SET_ASIDE = Statement(
    "snapshots.forget_set_aside",
    "DELETE FROM snapshots WHERE session_id = %(session_id)s AND set_aside",
)

# Runs after LOCK_SESSION in the same transaction.
SET_ASIDE = Statement(
    "snapshots.set_aside",
    """
    WITH present AS (
        UPDATE sessions SET variables_tick = NULL WHERE session_id = %(session_id)s
    )
    UPDATE snapshots SET set_aside = true WHERE session_id = %(session_id)s AND NOT set_aside AND tick = %(tick)s
    """,
)

DELETE = Statement(
    "snapshots.delete",
    """
    WITH held AS (
        UPDATE sessions SET variables_tick = NULL, saved_token = NULL, saved_tick = NULL
        WHERE session_id = %(session_id)s
        RETURNING session_id
    )
    DELETE FROM snapshots USING held WHERE snapshots.session_id = held.session_id
    """,
)

# --- import ------------------------------------------------------------------------------

# Claims a session on these conditions: each of its turns is settled or has not begun, the session's end is not
# requested, no process holds the session's lease, and the session is still at `tick`.
CLAIM_FOR_IMPORT = Statement(
    "snapshots.claim_for_import",
    f"""
    WITH candidate AS (
        SELECT session_id FROM sessions
        WHERE session_id = %(session_id)s AND tick = %(tick)s AND {keyed("end_requested_at IS NULL")}
          AND NOT EXISTS (SELECT FROM turns AS t
                          WHERE t.session_id = %(session_id)s AND t.settled_at IS NULL AND t.status <> 'accepted')
          AND {UNLEASED}
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE sessions AS s
    SET {RAISED}, lease_owner = 'import',
        lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
    FROM candidate WHERE s.session_id = candidate.session_id
    RETURNING s.token, s.nonce
    """,  # noqa: S608 (constants)
)

# Writes the restored variables and releases the session. After this statement, the session's queued turns may begin at
# once.
RESTORE = Statement(
    "snapshots.restore",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET variables_tick = tick, lease_until = NULL, lease_owner = NULL, woken_at = NULL,
            saved_token = CASE WHEN %(elsewhere)s THEN token ELSE saved_token END,
            saved_tick = CASE WHEN %(elsewhere)s THEN tick ELSE saved_tick END
        WHERE {HELD}
        RETURNING session_id, token, tick
    )
    INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)
    SELECT session_id, false, %(variables)s::json, '[]', tick, token, perdure_now() FROM fenced
    ON CONFLICT (session_id, set_aside, tick) DO UPDATE
    SET variables = excluded.variables, events = excluded.events, token = excluded.token, saved_at = excluded.saved_at
    RETURNING session_id
    """,  # noqa: S608 (constants)
)

RELEASE = Statement(
    "snapshots.release_session",
    f"""
    UPDATE sessions SET lease_until = NULL, lease_owner = NULL, woken_at = NULL
    WHERE {HELD}
    """,  # noqa: S608 (constants)
)

STANDING = Statement(
    "snapshots.standing",
    "SELECT tick, end_requested_at IS NOT NULL AS over FROM sessions WHERE session_id = %(session_id)s",
    writes=False,
)
