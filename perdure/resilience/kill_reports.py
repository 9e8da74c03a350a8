"""Reports of workers that their watchdogs killed recently, for the operator. The reports are stored in Redis only.

The reports are a sorted set, ordered by the time of the report on Redis's clock. The program
`perdure.workers.watchdog.kill_report` writes the set, and `/readyz` reads it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

import redis

from perdure.errors import loggable
from perdure.redis import connect

log = logging.getLogger(__name__)

LATELY_S = 3_600
"""Seconds for which a report is kept."""

_MOST = 100

_WITHDRAW_S = 30.0
"""Seconds within which a report can be withdrawn. An older report with the same worker name and process id is about
another process."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed after `silent_s` seconds without a heartbeat. `killed_at` is a Unix time in seconds."""

    worker: str
    pid: int
    silent_s: float
    killed_at: float


class Kills:
    """The reports of an installation, in the Redis at `url`, under a key that begins with `prefix`. Thread-safe."""

    def __init__(self, url: str, prefix: str) -> None:
        self._client: Any = connect(url)
        self._key = f"{prefix}killed-workers"

    def add(self, worker: str, pid: int, silent_s: float) -> None:
        """Report a kill at the current time.

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
        """Remove a report of the last `_WITHDRAW_S` seconds. The watchdog calls this if the worker recovered.

        Raises:
            redis.RedisError: Redis is unavailable.
        """
        for entry in self._client.zrangebyscore(self._key, self._now() - _WITHDRAW_S, "+inf"):
            kill = _kill(entry)
            if kill is not None and (kill.worker, kill.pid, kill.silent_s) == (worker, pid, silent_s):
                self._client.zrem(self._key, entry)

    def lately(self) -> list[Kill]:
        """The kills of the last `LATELY_S` seconds, oldest first; empty if Redis is unavailable."""
        try:
            entries = self._client.zrangebyscore(self._key, self._now() - LATELY_S, "+inf")
        except redis.RedisError as error:
            log.warning("cannot read which workers were killed recently (%s)", loggable(error))
            return []
        return [kill for entry in entries if (kill := _kill(entry)) is not None]

    def close(self) -> None:
        self._client.close()

    def _now(self) -> float:
        seconds, microseconds = self._client.time()
        return float(seconds + microseconds / 1e6)


def _kill(entry: bytes) -> Kill | None:
    try:
        record = json.loads(entry)
        return Kill(str(record["worker"]), int(record["pid"]), float(record["silent_s"]), float(record["killed_at"]))
    except (ValueError, KeyError, TypeError):
        return None
