"""Removes an erased user's texts from the statistics of PostgreSQL's query planner.

`ANALYZE` stores samples of each column (`pg_stats`). Samples of erased rows stay until the next `ANALYZE`: by
default, autovacuum analyzes a table once 50 rows plus a tenth of the table have changed.

The transaction of an erasure (`perdure.users.queries.NOTE`) adds each table with users' data to `stale_statistics`.
Workers call `forget_samples` in the background (`perdure.workers.upkeep`), so neither the erasure nor the sweep waits
for `ANALYZE`. The rights of the tables' owner suffice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import Row

from perdure.database.engine import Database, Statement
from perdure.errors import loggable
from perdure.users.tables import SHARED_TABLES, USER_TABLES

log = logging.getLogger(__name__)

_RETRY_S = 300
_DAY_S = 86_400

# Takes the next table by moving its `due_at`. A worker that crashes or fails leaves the table to a later call.
#
# PostgreSQL skips a table with only a warning if the role may not analyze it, hence `permitted`. The owner of the table
# or of the database may; from PostgreSQL 17, so may a role with MAINTAIN. `clears`: whether the server has the function
# `pg_clear_attribute_stats` (PostgreSQL 18).
_TAKE = Statement(
    "statistics.take",
    """
    WITH due AS (
        SELECT table_name FROM stale_statistics
        WHERE (due_at <= perdure_now() OR due_at > perdure_now() + make_interval(secs => %(day_s)s))
          AND table_name = ANY (%(tables)s::text[])
        ORDER BY due_at, table_name LIMIT 1
        FOR UPDATE SKIP LOCKED
    )
    UPDATE stale_statistics AS s SET due_at = perdure_now() + make_interval(secs => %(retry_s)s)
    FROM due
    JOIN pg_class AS c ON c.relname = due.table_name AND c.relnamespace = quote_ident(current_schema())::regnamespace
    JOIN pg_database AS d ON d.datname = current_database()
    WHERE s.table_name = due.table_name
    RETURNING s.table_name, s.erased_at, current_setting('server_version_num')::int >= 180000 AS clears,
        CASE WHEN pg_has_role(c.relowner, 'USAGE') OR pg_has_role(d.datdba, 'USAGE') THEN true
             WHEN current_setting('server_version_num')::int >= 170000 THEN has_table_privilege(c.oid, 'MAINTAIN')
             ELSE false END AS permitted
    """,
)

# Keeps the row if another user was erased since the table was taken.
_DONE = Statement(
    "statistics.done",
    "DELETE FROM stale_statistics WHERE table_name = %(table_name)s AND erased_at = %(erased_at)s",
)

_POSTPONE = Statement(
    "statistics.postpone",
    """
    UPDATE stale_statistics SET due_at = perdure_now() + make_interval(secs => %(day_s)s)
    WHERE table_name = %(table_name)s
    """,
)

_IS_EMPTY = {
    table: Statement(
        f"statistics.is_empty.{table}",
        f"SELECT NOT EXISTS (SELECT FROM {table}) AS empty",  # noqa: S608 (constants)
        writes=False,
    )
    for table in (*(each.table for each in USER_TABLES), *sorted(SHARED_TABLES))
}

# `ANALYZE` does not change the statistics of an empty table, so this statement deletes those of the table and its
# indexes. Reads `pg_stats`, because only superusers may read `pg_statistic`.
_CLEAR = Statement(
    "statistics.clear",
    """
    SELECT count(pg_clear_attribute_stats(s.schemaname, s.tablename, s.attname, s.inherited))
    FROM pg_stats AS s
    WHERE s.schemaname = current_schema() AND s.tablename IN (
        SELECT %(table_name)s::text UNION ALL
        SELECT c.relname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
        WHERE i.indrelid = to_regclass(%(table_name)s::text)
    )
    """,
)


def forget_samples(database: Database, go_on: Callable[[], bool] = lambda: True) -> int:
    """Analyze the tables in `stale_statistics` that are due; returns how many are done.

    Each table stands alone: a table that fails, for example because it is being vacuumed, is due again after
    `_RETRY_S` seconds. A table that the role may not analyze, and an empty table before PostgreSQL 18, are due again
    after a day. Calls `go_on` between two tables, and stops if `go_on` returns False.
    """
    done, refused = 0, list[str]()
    taken = {"tables": list(_IS_EMPTY), "retry_s": _RETRY_S, "day_s": _DAY_S}
    while go_on() and (rows := database.run(_TAKE, taken)):
        row = rows[0]
        try:
            forgotten = row.permitted and _forget(database, row)
        except Exception as error:  # noqa: BLE001 (the other tables must have their turn)
            log.warning("the statistics of %s are updated later: %s", row.table_name, loggable(error))
            continue
        if forgotten:
            database.run(_DONE, {"table_name": row.table_name, "erased_at": row.erased_at})
            done += 1
        else:
            database.run(_POSTPONE, {"table_name": row.table_name, "day_s": _DAY_S})
            refused += [] if row.permitted else [row.table_name]
    if refused:
        log.warning(
            "the role may not analyze %d tables, so texts of erased users stay in pg_stats until autovacuum analyzes "
            "them: let the owner run ANALYZE, or grant MAINTAIN (PostgreSQL 17): %s",
            len(refused), ", ".join(refused),
        )  # fmt: skip
    return done


def _forget(database: Database, row: Row[Any]) -> bool:
    """Update the statistics of a table; returns whether no sample of an erased row remains."""
    database.analyze(row.table_name)
    if not database.run(_IS_EMPTY[row.table_name], {})[0].empty:
        return True
    if row.clears:
        database.run(_CLEAR, {"table_name": row.table_name})
    return bool(row.clears)
