"""The Redis streams of turn events: their keys, and their deletion when the user is erased.

A stream contains the provisional text of a turn, and expires. `perdure.events` writes and reads the streams.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from perdure.memory.redis.cache import Cache


def stream_key(prefix: str, turn_id: UUID) -> str:
    return f"{prefix}events:{turn_id}"


def streams_key(prefix: str, session_id: UUID) -> str:
    """The key of the Redis set that lists the event streams of a session. Its members are turn ids."""
    return f"{prefix}events-of:{session_id}"


class EventStreams:
    """The event streams of all turns."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def forget(self, session_id: UUID) -> None:
        """Delete the streams of a session's turns."""
        prefix = self._cache.prefix
        index = streams_key(prefix, session_id)

        def work(client: Any) -> None:
            turn_ids = [UUID(each.decode("ascii")) for each in client.smembers(index)]
            client.unlink(index, *(stream_key(prefix, turn_id) for turn_id in turn_ids))

        self._cache.require(work)
