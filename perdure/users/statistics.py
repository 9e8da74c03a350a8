"""Removes an erased user's texts from the statistics of PostgreSQL's query planner.

`ANALYZE` stores samples of each column (`pg_stats`). Samples of erased rows stay until the next `ANALYZE`: by
default, autovacuum analyzes a table once 50 rows plus a tenth of the table have changed.

The second pass of an erasure (`perdure.users.erase`) calls `forget_samples`.
"""

from __future__ import annotations

from perdure.database.engine import Database, Statement
from perdure.users.tables import USER_TABLES

_CAN_CLEAR = 180_000
"""The lowest `server_version_num` with the function `pg_clear_attribute_stats` (PostgreSQL 18)."""

# `ANALYZE` does not change the statistics of an empty table, so this statement deletes them.
CLEAR_EMPTY = Statement(
    "erasure.clear_statistics",
    """
    WITH relations AS (
        SELECT t.oid FROM unnest(%(tables)s::regclass[]) AS t (oid)
        UNION ALL
        SELECT i.indexrelid FROM pg_index AS i WHERE i.indrelid = ANY (%(tables)s::regclass[])
    )
    SELECT count(pg_clear_attribute_stats(n.nspname, c.relname, a.attname, s.stainherit))
    FROM relations
    JOIN pg_class AS c USING (oid) JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_statistic AS s ON s.starelid = c.oid
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = s.staattnum
    """,
)


_EMPTY = Statement(
    "erasure.empty_tables",
    " UNION ALL ".join(
        f"SELECT '{each.table}' AS name WHERE NOT EXISTS (SELECT FROM {each.table})"  # noqa: S608 (constants)
        for each in USER_TABLES
    ),
    writes=False,
)

_VERSION = Statement(
    "erasure.server_version", "SELECT current_setting('server_version_num')::int AS number", writes=False
)


def forget_samples(database: Database) -> None:
    """Analyze each table with users' data, in its own commit, and delete the statistics of empty tables.

    `ANALYZE` blocks no writer. Before PostgreSQL 18, an empty table keeps its samples until it has rows and is analyzed
    again.

    Raises:
        Unavailable: the database cannot be reached.
    """
    for each in USER_TABLES:
        database.define(f"ANALYZE @schema.{each.table}")
    empty = [row.name for row in database.run(_EMPTY, {})]
    if empty and database.run(_VERSION, {})[0].number >= _CAN_CLEAR:
        database.run(CLEAR_EMPTY, {"tables": empty})
