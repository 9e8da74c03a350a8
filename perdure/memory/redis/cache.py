"""The Redis connection of the memory layers, with two ways to use it.

Turns use `attempt`, so that Redis cannot fail or delay a turn. `attempt` logs a failure. After a connection error or a
timeout, `attempt` skips Redis for five seconds. The end of a session uses `require`, because no data of the session may
stay in Redis. `require` raises an error if Redis fails.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import redis

from perdure.clock import Clock
from perdure.errors import Unavailable
from perdure.redis import connect, remedy, where
from perdure.settings import REDIS_PREFIX
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

_PAUSE_S = 5.0
_UNAVAILABLE = (redis.ConnectionError, redis.TimeoutError)

Result = TypeVar("Result")


class Cache:
    """A client of the Redis at `url`, which may be unavailable. Each use ends within two seconds. Threads may share it.

    Callers begin each key with `prefix`.
    """

    def __init__(self, url: str, clock: Clock, prefix: str = REDIS_PREFIX) -> None:
        self.prefix = prefix
        self._name = f"redis ({where(url)})"
        # Typed as Any, because redis-py's return types include the awaitables of its asynchronous client.
        self._client: Any = connect(url)
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_until = 0.0

    def attempt(self, action: str, work: Callable[[Any], Result]) -> Result | None:
        """Return the result of `work(client)`, or `None` if Redis fails. Logs a failure with the text `action`.

        For five seconds after a connection error or a timeout, calls return `None` without using Redis.
        """
        with self._lock:
            if self._clock.monotonic() < self._pause_until:
                return None
        try:
            return work(self._client)
        except redis.RedisError as error:
            if isinstance(error, _UNAVAILABLE):
                with self._lock:
                    self._pause_until = self._clock.monotonic() + _PAUSE_S
            log.warning("%s Skipped: %s", self._explain(error), action)
            return None

    def require(self, work: Callable[[Any], Result]) -> Result:
        """The result of `work(client)`.

        Raises:
            Unavailable: Redis cannot be used; `work` may or may not have taken effect.
        """
        try:
            return work(self._client)
        except redis.RedisError as error:
            raise Unavailable(self._explain(error)) from error

    def close(self) -> None:
        self._client.close()

    def _explain(self, error: redis.RedisError) -> str:
        return f"Working memory in {self._name} cannot be used: {first_line(str(error))}. {remedy(error)}"
