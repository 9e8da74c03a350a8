"""The layers of memory that are in Redis, over one connection, and what becomes of them at a session's end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.memory.redis import queries
from perdure.memory.redis.cache import Cache
from perdure.memory.redis.flush import Blocked, Flushed, Stale, flush
from perdure.memory.redis.stream import Stream
from perdure.memory.redis.working import WorkingMemory
from perdure.settings import REDIS_PREFIX, MemorySettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisMemory:
    """Layers 0 and 1. Threads share it."""

    cache: Cache
    stream: Stream
    working: WorkingMemory

    @classmethod
    def at(cls, url: str, limits: MemorySettings, clock: Clock, prefix: str = REDIS_PREFIX) -> RedisMemory:
        """The layers in the Redis at `url`, in kombu's spelling or redis-py's, under keys that begin with `prefix`.

        Nothing is connected yet.
        """
        cache = Cache(url, clock, prefix)
        return cls(cache, Stream(cache), WorkingMemory(cache, limits.working_turns, limits.working_ttl_s))

    def flush(self, database: Database, session_id: UUID, fence: Fence) -> int | None:
        """Write to PostgreSQL the remembered turns that it lacks, under a current `fence`; how many were written.

        None where they are left to whoever holds the session next: the fence is stale, or a turn is to run first.

        Raises:
            Unavailable: Redis or PostgreSQL cannot be reached.
        """
        outcome = flush(database, self.working, session_id, fence)
        match outcome:
            case Flushed(written):
                return written
            case Blocked(lacking):
                log.warning(
                    "session %s has %d turns to flush behind the one that it still has to run", session_id, lacking
                )
                return None
            case Stale():
                return None
            case _:
                assert_never(outcome)

    def end_session(self, database: Database, session_id: UUID, fence: Fence) -> bool:
        """Flush and remove what is kept here of a session that is ending under `fence`.

        May be called again after a crash. False under a stale fence: then nothing is removed.

        Raises:
            Unavailable: Redis or PostgreSQL cannot be reached; something may be left, so it is to be called again.
        """
        outcome = flush(database, self.working, session_id, fence)
        match outcome:
            case Flushed():
                pass
            case Blocked():
                raise Unavailable(f"Session {session_id} has a turn to run: its working memory is not flushed yet.")
            case Stale():
                return False
            case _:
                assert_never(outcome)
        rows = database.run(queries.ENDING, fence.on(session_id))
        if not rows:
            return False
        if not rows[0].is_fork:  # the stream is that of the conversation which it was copied from
            self.stream.trim_session(rows[0].user_id, rows[0].channel, rows[0].end_requested_at)
        self.working.forget(session_id)
        return True

    def close(self) -> None:
        """Close the connections."""
        self.cache.close()
