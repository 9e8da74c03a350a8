"""The statements of a user's erasure and linked identities."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import RAISED
from perdure.users.tables import OF_TURNS, USER_TABLES, UserTable

# Fences the processes that run the user's sessions: these processes can no longer write. Locks the sessions, the oldest
# first, as a message does that answers the question of an agent below: it locks the session above before this one.
RAISE_TOKENS = Statement(
    "erasure.raise_tokens",
    f"""
    WITH locked AS (
        SELECT session_id FROM sessions WHERE user_id = %(user_id)s ORDER BY session_id FOR NO KEY UPDATE
    )
    UPDATE sessions AS s SET {RAISED}, lease_owner = NULL, lease_until = NULL
    FROM locked WHERE s.session_id = locked.session_id
    RETURNING s.session_id
    """,  # noqa: S608 (constants)
)

# Locks the user's row. Until the commit, no new row can reference it, so no session opens and no memory is stored.
LOCK_USER = Statement("erasure.lock_user", "SELECT FROM users WHERE user_id = %(user_id)s FOR UPDATE")

# Replaces the user in decisions about other users' calls. Runs before the erasure's transaction, which locks the user's
# own calls: two users who have decided about each other's calls could otherwise not be erased concurrently.
FORGET_DECIDER = Statement(
    "erasure.forget_decider",
    "UPDATE tool_effects SET decided_by = 'user:' WHERE decided_by = 'user:' || %(user_id)s::text",
)

# Locks the user's cases before the erasure deletes plan items. A CaseBank run takes these locks in the same order.
LOCK_CASES = Statement(
    "erasure.lock_cases", "SELECT FROM cases WHERE user_id = %(user_id)s ORDER BY case_id FOR UPDATE"
)

# Tool calls with a Celery task that may still be queued. A call with a list of arguments has one task for each element;
# `parts` has the indexes of the elements whose tasks may still be queued.
QUEUED_CALLS = Statement(
    "erasure.queued_calls",
    f"""
    SELECT effect_id, parts IS NOT NULL AS is_list,
           ARRAY(SELECT part.number - 1 FROM json_array_elements(parts) WITH ORDINALITY AS part (stored, number)
                 WHERE part.stored ->> 0 NOT IN ('waiting', 'done', 'failed')) AS parts
    FROM tool_effects
    WHERE waits_for = 'task' AND (status = 'intended' OR probe_at IS NOT NULL) AND {OF_TURNS}
    """,  # noqa: S608 (constants)
    writes=False,
)

# Schedules the second pass after the duration of a lease. By that time, a process that was paused during the erasure
# has lost its session's lease. Also notes that the planner's statistics may have samples of the erased rows; see
# `perdure.users.statistics`.
NOTE = Statement(
    "erasure.note",
    """
    WITH sampled AS (
        INSERT INTO stale_statistics (table_name, erased_at, due_at)
        SELECT name, perdure_now(), perdure_now() FROM unnest(%(tables)s::text[]) AS name ORDER BY name
        ON CONFLICT (table_name) DO UPDATE SET erased_at = excluded.erased_at
    )
    INSERT INTO erasures (erasure_id, user_id, session_ids, task_ids, erased_at, due_at)
    VALUES (%(erasure_id)s, %(user_id)s, %(session_ids)s::uuid[], %(task_ids)s::uuid[], perdure_now(),
            perdure_now() + make_interval(secs => %(lease_s)s))
    RETURNING erased_at
    """,
)

TO_REVOKE = Statement(
    "erasure.to_revoke",
    """
    SELECT erasure_id, task_ids FROM erasures WHERE revoked_at IS NULL AND task_ids <> '{}'
    ORDER BY due_at LIMIT %(most)s
    """,
    writes=False,
)

REVOKED = Statement(
    "erasure.revoked",
    "UPDATE erasures SET revoked_at = perdure_now() WHERE erasure_id = ANY (%(erasure_ids)s::uuid[])",
)

# Takes the erasures whose second pass is due, for the duration of a lease: a pass that hangs in a third party's store
# occupies one worker, and holds up its own erasures only.
DUE = Statement(
    "erasure.due",
    """
    WITH due AS (
        SELECT erasure_id FROM erasures
        WHERE due_at <= perdure_now() OR due_at > perdure_now() + make_interval(secs => %(lease_s)s::float * 2)
        ORDER BY due_at LIMIT %(most)s FOR UPDATE SKIP LOCKED
    )
    UPDATE erasures AS e SET due_at = perdure_now() + make_interval(secs => %(lease_s)s)
    FROM due WHERE e.erasure_id = due.erasure_id
    RETURNING e.erasure_id, e.user_id, e.session_ids, e.task_ids, e.erased_at
    """,
)

FINISH = Statement("erasure.finish", "DELETE FROM erasures WHERE erasure_id = %(erasure_id)s")

POSTPONE = Statement(
    "erasure.postpone",
    """
    UPDATE erasures SET due_at = perdure_now() + make_interval(secs => %(lease_s)s) WHERE erasure_id = %(erasure_id)s
    """,
)


def _erase(user_table: UserTable) -> Statement:
    table = user_table.table
    delete = f"DELETE FROM {table} WHERE {user_table.of_user} RETURNING 1"  # noqa: S608 (constants)
    return Statement(f"erasure.{table}", f"WITH gone AS ({delete}) SELECT count(*) AS gone FROM gone")  # noqa: S608


ERASE = {user_table.table: _erase(user_table) for user_table in USER_TABLES if user_table.table != "files"}
"""By table, the statement that deletes a user's rows. Files are deleted together with their contents."""

# Replaces the user's earlier code, since a user has at most one. Inserts the user if it does not exist.
MINT_CODE = Statement(
    "links.mint",
    """
    WITH known AS (
        INSERT INTO users (user_id, created_at) VALUES (%(user_id)s, perdure_now()) ON CONFLICT DO NOTHING
    )
    INSERT INTO link_codes (user_id, code_hash, expires_at)
    VALUES (%(user_id)s, %(code_hash)s, perdure_now() + make_interval(secs => %(valid_s)s))
    ON CONFLICT (user_id) DO UPDATE SET code_hash = excluded.code_hash, expires_at = excluded.expires_at
    RETURNING expires_at
    """,
)

# Counts an attempt, up to `most` + 1 in a window. `wait_s`: seconds until the window ends and the count restarts.
COUNT_ATTEMPT = Statement(
    "links.count_attempt",
    """
    INSERT INTO link_attempts AS a (tenant, channel, external_id, attempts, since)
    VALUES (%(tenant)s, %(channel)s, %(external_id)s, 1, perdure_now())
    ON CONFLICT (tenant, channel, external_id) DO UPDATE SET
        attempts = CASE WHEN a.since + make_interval(secs => %(window_s)s) <= perdure_now() THEN 1
                        ELSE least(a.attempts, %(most)s) + 1 END,
        since = CASE WHEN a.since + make_interval(secs => %(window_s)s) <= perdure_now() THEN perdure_now()
                     ELSE a.since END
    RETURNING attempts,
        extract(epoch FROM since + make_interval(secs => %(window_s)s) - perdure_now())::float AS wait_s
    """,
)

# Deletes a valid code of a user of the tenant, and links the identity to that user. Locks the user before the code: an
# erasure takes these locks in the same order, so the two cannot deadlock.
REDEEM_CODE = Statement(
    "links.redeem",
    """
    WITH minted AS (
        SELECT users.user_id FROM link_codes JOIN users USING (user_id)
        WHERE code_hash = %(code_hash)s AND expires_at > perdure_now()
          AND CASE WHEN strpos(users.user_id, chr(31)) > 0 THEN split_part(users.user_id, chr(31), 1)
                   ELSE '' END = %(tenant)s
        FOR KEY SHARE OF users
    ), used AS (
        DELETE FROM link_codes AS c USING minted
        WHERE c.user_id = minted.user_id AND c.code_hash = %(code_hash)s
        RETURNING c.user_id
    )
    INSERT INTO identities (tenant, channel, external_id, user_id, created_at)
    SELECT %(tenant)s, %(channel)s, %(external_id)s, user_id, perdure_now() FROM used
    ON CONFLICT (tenant, channel, external_id)
    DO UPDATE SET user_id = excluded.user_id, created_at = excluded.created_at
    RETURNING user_id
    """,
)

USER_OF_IDENTITY = Statement(
    "links.user",
    """
    SELECT user_id FROM identities
    WHERE tenant = %(tenant)s AND channel = %(channel)s AND external_id = %(external_id)s
    """,
    writes=False,
)

LINKS = Statement(
    "links.list",
    """
    SELECT channel, external_id, created_at FROM identities WHERE user_id = %(user_id)s
    ORDER BY channel, external_id LIMIT %(most)s
    """,
    writes=False,
)

UNLINK = Statement(
    "links.remove",
    """
    DELETE FROM identities
    WHERE tenant = %(tenant)s AND channel = %(channel)s AND external_id = %(external_id)s AND user_id = %(user_id)s
    RETURNING 1
    """,
)
