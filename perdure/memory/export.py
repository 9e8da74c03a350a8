"""Everything that is held about a user, as one JSON document: the counterpart of `erasure`."""

from __future__ import annotations

from typing import Any

from perdure.clock import Clock
from perdure.database.engine import Executor
from perdure.errors import NotFound
from perdure.memory import erasure_queries as queries
from perdure.memory.stream import MAX_ENTRIES
from perdure.memory.volatile import Volatile


def export_user(executor: Executor, clock: Clock, volatile: Volatile | None, user_id: str) -> dict[str, Any]:
    """The rows of every table that are the user's, by table, and what is on their stream.

    What else is in Redis or in a store of snapshots is a copy of these rows.

    Raises:
        NotFound: nothing is held about that user.
        Unavailable: the database cannot be reached.
    """
    asked = {"user_id": user_id}
    tables = {table: [row.kept for row in executor.run(read, asked)] for table, read in queries.EXPORT.items()}
    if not any(tables.values()):
        raise NotFound("Nothing is held about that user.")
    happened = volatile.stream.recent(user_id, MAX_ENTRIES) if volatile is not None else []
    return {
        "user_id": user_id,
        "exported_at": clock.now().isoformat(),
        "tables": tables,
        "stream": [{"kind": each.kind, "channel": each.channel, "at": each.at.isoformat()} for each in happened],
    }
