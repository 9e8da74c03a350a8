"""Builds indexes of tables that are in use, without blocking readers or writers.

PostgreSQL marks an index as invalid during its build, and an interrupted build leaves an invalid index. Writers update
an invalid index, but no query uses it.
"""

from __future__ import annotations

import logging
import time

from perdure.database.engine import Database, Statement

log = logging.getLogger(__name__)

_STATE = Statement(
    "database.index_state",
    """
    SELECT i.indisvalid AS valid,
           EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.relid = i.indrelid) AS building
    FROM pg_index AS i WHERE i.indexrelid = to_regclass(%(name)s::text)
    """,
    writes=False,
)


def build_index(database: Database, name: str, definition: str) -> bool:
    """Build the index `name` unless it exists; returns whether the index can be used.

    Takes minutes on large tables, and first waits for all transactions that are older. If an earlier build was
    interrupted, its remains are dropped first. If the server still builds an index of the table for a process that has
    ended, returns False at once. Only one process at a time may call this function for an index.

    Args:
        database: The database.
        name: The index's name, which needs no quoting.
        definition: The part of `CREATE INDEX` after the name, with the markers of `perdure.database.schema`.
    """
    found = database.run(_STATE, {"name": name})
    if found and found[0].valid:
        return True
    if found and found[0].building:
        log.info("the server still builds the index %s", name)
        return False
    if found:
        log.info("drops the index %s, whose build was interrupted", name)
        database.define(_drop(name))
    log.info("builds the index %s; the build waits for all older transactions, and blocks no reader or writer", name)
    began = time.monotonic()
    try:
        database.define(f"CREATE INDEX CONCURRENTLY {name} {definition}")
    except Exception:
        database.define(_drop(name))  # writers would update the invalid index until the next build
        raise
    log.info("built the index %s in %.1f s", name, time.monotonic() - began)
    return True


def _drop(name: str) -> str:
    return f"DROP INDEX CONCURRENTLY IF EXISTS @schema.{name}"
