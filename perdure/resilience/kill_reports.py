"""Workers that their watchdog killed recently, in Redis: a notice for the operator, which may be lost.

A sorted set by the time of the kill, in Redis's clock. `perdure.workers.watchdog.kill_report` writes it, `/readyz`
reads it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

import redis

from perdure.redis import connect

log = logging.getLogger(__name__)

LATELY_S = 3_600
"""Seconds for which a kill is remembered."""

_MOST = 100

_WITHDRAW_S = 30.0
"""Seconds within which a report can be withdrawn; earlier ones of the same name and process id are another worker's."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: the worker's name, its process id, the seconds that it was silent, and when (Unix time)."""

    worker: str
    pid: int
    silent_s: float
    killed_at: float


class Kills:
    """The kills of an installation, in the Redis at `url`, under keys that begin with `prefix`. Thread-safe."""

    def __init__(self, url: str, prefix: str) -> None:
        self._client: Any = connect(url)
        self._key = f"{prefix}killed-workers"

    def add(self, worker: str, pid: int, silent_s: float) -> None:
        """Record a kill that happens now.

        Raises:
            redis.RedisError: Redis is unavailable.
        """
        now = self._now()
        kill = Kill(worker, pid, silent_s, now)
        with self._client.pipeline() as pipe:
            pipe.zadd(self._key, {json.dumps(asdict(kill)): now})
            pipe.zremrangebyscore(self._key, "-inf", now - LATELY_S)
            pipe.zremrangebyrank(self._key, 0, -_MOST - 1)
            pipe.expire(self._key, LATELY_S)
            pipe.execute()

    def withdraw(self, worker: str, pid: int, silent_s: float) -> None:
        """Remove a kill that was added in the last `_WITHDRAW_S` seconds: the worker recovered.

        Raises:
            redis.RedisError: Redis is unavailable.
        """
        for entry in self._client.zrangebyscore(self._key, self._now() - _WITHDRAW_S, "+inf"):
            kill = _kill(entry)
            if kill is not None and (kill.worker, kill.pid, kill.silent_s) == (worker, pid, silent_s):
                self._client.zrem(self._key, entry)

    def lately(self) -> list[Kill]:
        """The kills of the last `LATELY_S` seconds, oldest first; none if Redis is unavailable."""
        try:
            entries = self._client.zrangebyscore(self._key, self._now() - LATELY_S, "+inf")
        except redis.RedisError as error:
            log.warning("the recent kills of workers cannot be read (%s)", error)
            return []
        return [kill for entry in entries if (kill := _kill(entry)) is not None]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _now(self) -> float:
        seconds, microseconds = self._client.time()
        return float(seconds + microseconds / 1e6)


def _kill(entry: bytes) -> Kill | None:
    """An entry of the set; `None` if this release cannot read it."""
    try:
        record = json.loads(entry)
        return Kill(str(record["worker"]), int(record["pid"]), float(record["silent_s"]), float(record["killed_at"]))
    except (ValueError, KeyError, TypeError):
        return None
