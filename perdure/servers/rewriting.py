"""Rewrites the append-only file of the embedded Redis after a user was erased.

The file contains every command since the last rewrite. A text that was deleted from Redis therefore remains in the file
until the next rewrite. A rewrite takes milliseconds, because Redis holds only wake-ups and caches. Erasures in quick
succession share a rewrite.
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
"""`rewrite` begins no rewrite within this many seconds after the previous one began. `rewritten` has no such limit."""


class AppendOnlyFile:
    """The append-only file of the Redis at `url`. Thread-safe; keeps no connection open between calls."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._began_at = -_APART_S
        self._covered: frozenset[UUID] = frozenset()
        """The erasures that the newest rewrite covers, if the rewrite succeeds before Redis is restarted."""
        self._server_run = ""

    def rewrite(self) -> None:
        """Begin a rewrite, unless one is running or the previous one began less than `_APART_S` seconds ago.

        Raises:
            Unavailable: Redis cannot be reached, or refuses the command.
        """
        with self._lock, self._connected() as client:
            if time.monotonic() - self._began_at >= _APART_S and _finished(client) is not None:
                self._begin(client)

    def rewritten(self, erasures: Collection[UUID]) -> frozenset[UUID]:
        """Return each of `erasures` whose deleted keys are no longer in the append-only file.

        If a rewrite is running, returns an empty set at once. Otherwise begins a rewrite if one of `erasures` needs it,
        and waits at most `_WAIT_S` seconds for its end. Call this method again for the erasures that it does not
        return.

        Raises:
            Unavailable: Redis cannot be reached, or refuses the command.
        """
        wanted = frozenset(erasures)
        with self._lock, self._connected() as client:
            ended_well = _finished(client)
            if ended_well is None:
                return frozenset()
            # After a restart, the server reports "ok" even if its previous run ended during a rewrite.
            server_run = client.info("server")["run_id"]
            done = self._covered & wanted if ended_well and server_run == self._server_run else frozenset()
            self._covered = frozenset()
            missing = wanted - done
            if not missing:
                return done
            self._begin(client)
            self._covered, self._server_run = missing, server_run
            if not _ends_well(client) or client.info("server")["run_id"] != server_run:
                return done
            return wanted

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
    info = client.info("persistence")
    if info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
        return None
    return bool(info["aof_last_bgrewrite_status"] == "ok")
