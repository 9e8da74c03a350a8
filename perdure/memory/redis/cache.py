"""The connection that the layers in Redis share, and the two ways to use it.

What a turn does here is a convenience and must never cost it more than a bounded wait: `attempt`
reports a Redis that is away, goes on without it, and then leaves it alone for a while, so that
not every turn waits. What ends a session must be sure: `require` raises instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import redis

from perdure.clock import Clock
from perdure.errors import Unavailable
from perdure.redis import connect, way_out, where
from perdure.settings import REDIS_PREFIX
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

_PAUSE_S = 5.0
_AWAY = (redis.ConnectionError, redis.TimeoutError)

Result = TypeVar("Result")


class Cache:
    """The Redis at `url`, which may be unavailable. Threads share it; each use ends within two seconds.

    `prefix` begins each key.
    """

    def __init__(self, url: str, clock: Clock, prefix: str = REDIS_PREFIX) -> None:
        self.prefix = prefix
        self._name = f"redis ({where(url)})"
        # Any: redis-py types its answers as those of its asynchronous twin, too.
        self._client: Any = connect(url)
        self._clock = clock
        self._lock = threading.Lock()
        self._away_until = 0.0

    def attempt(self, what: str, work: Callable[[Any], Result]) -> Result | None:
        """What `work` returns, given the client; None if it was not done, which is reported as `what`."""
        with self._lock:
            if self._clock.monotonic() < self._away_until:
                return None
        try:
            return work(self._client)
        except redis.RedisError as error:
            if isinstance(error, _AWAY):
                with self._lock:
                    self._away_until = self._clock.monotonic() + _PAUSE_S
            log.warning("%s; not done: %s", self._explain(error), what)
            return None

    def require(self, work: Callable[[Any], Result]) -> Result:
        """What `work` returns, given the client.

        Raises:
            Unavailable: Redis cannot be used; what was under way may or may not have happened.
        """
        try:
            return work(self._client)
        except redis.RedisError as error:
            raise Unavailable(self._explain(error)) from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _explain(self, error: redis.RedisError) -> str:
        return f"Working memory in {self._name} cannot be used: {first_line(str(error))}. {way_out(error)}"
