"""The statements of a user's erasure and export."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import RAISED
from perdure.database.tables import metadata
from perdure.users.tables import USER_TABLES, UserTable

# Fences the processes that run these sessions: they can no longer write. Locks the sessions until the commit.
RAISE_TOKENS = Statement(
    "erasure.raise_tokens",
    f"""
    UPDATE sessions AS s SET {RAISED}, lease_owner = NULL, lease_until = NULL WHERE user_id = %(user_id)s
    RETURNING session_id
    """,  # noqa: S608 (constants)
)

# Until the commit, no new row can reference the user: no session opens, no memory is stored.
LOCK_USER = Statement("erasure.lock_user", "SELECT FROM users WHERE user_id = %(user_id)s FOR UPDATE")

# The same lock order as in a run of the CaseBank: cases, then the items of its plan.
LOCK_CASES = Statement(
    "erasure.lock_cases", "SELECT FROM cases WHERE user_id = %(user_id)s ORDER BY case_id FOR UPDATE"
)

# The second pass outside PostgreSQL, due after one lease, when every paused process has lost its session.
NOTE = Statement(
    "erasure.note",
    """
    INSERT INTO erasures (erasure_id, user_id, session_ids, erased_at, due_at)
    VALUES (%(erasure_id)s, %(user_id)s, %(session_ids)s::uuid[], perdure_now(),
            perdure_now() + make_interval(secs => %(lease_s)s))
    RETURNING user_id, session_ids, erased_at
    """,
)

DUE = Statement(
    "erasure.due",
    """
    SELECT erasure_id, user_id, session_ids, erased_at FROM erasures
    WHERE due_at <= perdure_now() OR due_at > perdure_now() + make_interval(secs => %(lease_s)s)
    ORDER BY due_at LIMIT %(most)s
    """,
    writes=False,
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


def _export(user_table: UserTable) -> Statement:
    table = user_table.table
    left_out = ", ".join(f"'{column}'" for column in user_table.left_out)
    order = ", ".join(column.name for column in metadata.tables[table].primary_key.columns)
    return Statement(
        f"export.{table}",
        f"""
        SELECT to_jsonb({table}) - ARRAY[{left_out}]::text[] AS kept
        FROM {table} WHERE {user_table.of_user} ORDER BY {order}
        """,  # noqa: S608 (constants)
        writes=False,
    )


ERASE = {user_table.table: _erase(user_table) for user_table in USER_TABLES}
EXPORT = {user_table.table: _export(user_table) for user_table in USER_TABLES}
