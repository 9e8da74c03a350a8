"""The layers of memory in Redis, which share one client. Flushes and deletes a session's data when the session ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.memory.redis import queries
from perdure.memory.redis.cache import Cache
from perdure.memory.redis.event_streams import EventStreams
from perdure.memory.redis.flush import Blocked, Flushed, Stale, flush
from perdure.memory.redis.stream import Stream
from perdure.memory.redis.working import WorkingMemory
from perdure.settings import REDIS_PREFIX, MemorySettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisMemory:
    """Layer 0 (the stream), layer 1 (working memory) and the event streams of turns. Threads may share it."""

    cache: Cache
    stream: Stream
    working: WorkingMemory
    events: EventStreams

    @classmethod
    def at(cls, url: str, limits: MemorySettings, clock: Clock, prefix: str = REDIS_PREFIX) -> RedisMemory:
        """The memory in the Redis at `url` (a kombu or redis-py URL). Each key begins with `prefix`.

        Connects on first use.
        """
        cache = Cache(url, clock, prefix)
        return cls(
            cache, Stream(cache), WorkingMemory(cache, limits.working_turns, limits.working_ttl_s), EventStreams(cache)
        )

    def flush(self, database: Database, session_id: UUID, fence: Fence) -> int | None:
        """Write the turns of working memory that PostgreSQL lacks; returns the number of turns written.

        Returns `None` and writes nothing in two cases: `fence` is stale, or PostgreSQL lacks turns and the session has
        an unsettled turn. A later flush can write the missing turns.

        Raises:
            Unavailable: Redis or PostgreSQL cannot be reached.
        """
        outcome = flush(database, self.working, session_id, fence)
        match outcome:
            case Flushed(written):
                return written
            case Blocked(missing):
                log.warning("session %s: %d turns are flushed once its unsettled turn is settled", session_id, missing)
                return None
            case Stale():
                return None
            case _:
                assert_never(outcome)

    def end_session(self, database: Database, session_id: UUID, fence: Fence) -> bool:
        """Write an ending session's working memory to PostgreSQL, then delete the session's memory from Redis.

        Idempotent. Returns False and deletes nothing if `fence` is stale.

        Raises:
            Unavailable: Redis or PostgreSQL cannot be reached, or a turn is unsettled; the caller must repeat the call.
        """
        outcome = flush(database, self.working, session_id, fence)
        match outcome:
            case Flushed():
                pass
            case Blocked():
                raise Unavailable(f"Session {session_id} has an unsettled turn: its working memory is not flushed yet.")
            case Stale():
                return False
            case _:
                assert_never(outcome)
        rows = database.run(queries.ENDING_SESSION, fence.on(session_id))
        if not rows:
            return False
        if not rows[0].is_fork:  # the channel's events belong to another session
            self.stream.trim_session(UserKey(rows[0].user_id), rows[0].channel, rows[0].end_requested_at)
        self.working.forget(session_id)
        return True

    def close(self) -> None:
        self.cache.close()
