"""Exports all data about a user as one JSON document, from the tables whose rows an erasure deletes."""

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
    """Return the user's rows, by table, and the events of the user's Redis stream.

    `user` is the user key; the document shows only the user's id, without the tenant. It omits working memory and
    snapshots, because they are copies of these rows.

    Raises:
        NotFound: there is no data about that user.
        Unavailable: the database cannot be reached.
    """
    key = {"user_id": user}
    tables = {table: [_with_id(row.kept) for row in executor.run(read, key)] for table, read in queries.EXPORT.items()}
    if not any(tables.values()):
        raise NotFound("There is no data about that user.")
    events = redis_memory.stream.recent(user, MAX_ENTRIES) if redis_memory is not None else []
    return {
        "user_id": user_of(user),
        "exported_at": clock.now().isoformat(),
        "tables": tables,
        "stream": [
            {"kind": each.kind, "channel": each.channel, "at": each.at.isoformat(), "by": each.by} for each in events
        ],
    }


def _with_id(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with the user key in `user_id` replaced by the user's id."""
    return {**row, "user_id": user_of(row["user_id"])} if row.get("user_id") else row
