"""Everything that is held about a user, as one JSON document: the counterpart of `erasure`."""

from __future__ import annotations

from typing import Any

from perdure.access.tenants import user_of
from perdure.clock import Clock
from perdure.database.engine import Executor
from perdure.errors import NotFound
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import MAX_ENTRIES
from perdure.users import queries


def export_user(executor: Executor, clock: Clock, redis_memory: RedisMemory | None, user: str) -> dict[str, Any]:
    """The rows of every table that are the user's, by table, and what is on their stream.

    `user` is the user's key; the document has the plain id. What else is in Redis or in a store of snapshots is a copy
    of these rows.

    Raises:
        NotFound: nothing is held about that user.
        Unavailable: the database cannot be reached.
    """
    asked = {"user_id": user}
    tables = {table: [_plain(row.kept) for row in executor.run(read, asked)] for table, read in queries.EXPORT.items()}
    if not any(tables.values()):
        raise NotFound("Nothing is held about that user.")
    happened = redis_memory.stream.recent(user, MAX_ENTRIES) if redis_memory is not None else []
    return {
        "user_id": user_of(user),
        "exported_at": clock.now().isoformat(),
        "tables": tables,
        "stream": [{"kind": each.kind, "channel": each.channel, "at": each.at.isoformat()} for each in happened],
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the user's id in place of the key."""
    return {**row, "user_id": user_of(row["user_id"])} if row.get("user_id") else row
