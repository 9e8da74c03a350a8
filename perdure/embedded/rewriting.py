"""Rewrites the append-only file of the embedded Redis after a user was erased.

The file holds each command since its last rewrite, so it still contains a deleted text. A rewrite takes milliseconds,
since Redis holds wake-ups and caches only. Erasures in quick succession share one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from typing import Any
from uuid import UUID

import redis

from perdure.errors import Unavailable
from perdure.redis import connect, remedy
from perdure.text.untrusted import first_line

_WAIT_S = 2.0
_POLL_S = 0.01
_APART_S = 5.0
"""Minimum seconds between two rewrites that erasures begin; the second pass of an erasure always begins one."""


class AppendOnlyFile:
    """The file of the Redis at `url`. Thread-safe; holds no connection open."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._began_at = -_APART_S
        self._covered: frozenset[UUID] = frozenset()

    def rewrite(self) -> None:
        """Begin a rewrite, unless one is running or another began within `_APART_S` seconds.

        Raises:
            Unavailable: Redis cannot be reached, or refuses.
        """
        with self._lock, self._connected() as client:
            if time.monotonic() - self._began_at >= _APART_S and _finished(client) is not None:
                self._begin(client)

    def rewritten(self, erasures: Collection[UUID]) -> frozenset[UUID]:
        """The `erasures` whose deleted keys a finished rewrite has also removed from the file.

        Begins a rewrite for the others and waits up to two seconds for it; call it again for those not returned.

        Raises:
            Unavailable: as `rewrite`.
        """
        asked = frozenset(erasures)
        with self._lock, self._connected() as client:
            ended_well = _finished(client)
            if ended_well is None:
                return frozenset()
            done = self._covered & asked if ended_well else frozenset()
            self._covered = asked - done
            if not self._covered:
                return done
            self._begin(client)
            if not _ends_well(client):
                return done
            self._covered = frozenset()
            return asked

    def _begin(self, client: Any) -> None:
        client.bgrewriteaof()
        self._began_at = time.monotonic()

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        try:
            with closing(connect(self._url)) as client:
                yield client
        except redis.RedisError as error:
            reason = first_line(str(error))
            raise Unavailable(f"Redis does not rewrite its append-only file: {reason}. {remedy(error)}") from error


def _ends_well(client: Any) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while (ended_well := _finished(client)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return ended_well is True


def _finished(client: Any) -> bool | None:
    """Whether the last rewrite succeeded; `None` while one is running or scheduled."""
    told = client.info("persistence")
    if told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"]:
        return None
    return bool(told["aof_last_bgrewrite_status"] == "ok")
