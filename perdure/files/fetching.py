"""Reads the files that messages name by URL.

A URL is read before its message is accepted, so what a message has never changes. The URL comes from a user and is
untrusted: a request reaches only public addresses (`perdure.network.egress`). Each process reads a few at a time, and
fewer of one user, because each occupies the thread that accepts the message.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from perdure.access.tenants import UserKey
from perdure.errors import InvalidRequest, RateLimited
from perdure.files.spool import Spool
from perdure.network import egress
from perdure.network.reply_urls import Reachable
from perdure.text.untrusted import first_line

TIMEOUT_S = 15.0
"""Seconds for one file, from the first DNS query to the last byte, redirects included."""

MOST, MOST_OF_USER = 8, 2
"""The most files that a process reads at a time, and those of one user."""

_RETRY_AFTER_S = 5.0


class Fetching:
    """Reads files by URL. Thread-safe."""

    def __init__(self) -> None:
        self._running: Counter[UserKey] = Counter()
        self._lock = threading.Lock()

    def fetch(self, url: str, user: UserKey, into: Spool) -> None:
        """Read the file at `url` into a spool.

        Raises:
            InvalidRequest: the URL is not allowed, or the file cannot be read in time.
            TooLarge: the file is longer than the spool accepts.
            RateLimited: too many files are being read.
        """
        import httpx2  # noqa: PLC0415 (few messages name a URL, and `perdure send` starts without it)

        shown = first_line(url, 200)
        with self._place(user):
            try:
                asyncio.run(_read(url, into))
            except TimeoutError:
                raise InvalidRequest(f"url: {shown} did not answer in full within {TIMEOUT_S:g} s.") from None
            except egress.EgressRefused as error:
                raise InvalidRequest(f"url: {error.message}") from None
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
                said = first_line(f"{type(error).__name__}: {error}")
                raise InvalidRequest(f"url: {shown} cannot be read: {said}") from error

    @contextmanager
    def _place(self, user: UserKey) -> Iterator[None]:
        with self._lock:
            if self._running[user] >= MOST_OF_USER or self._running.total() >= MOST:
                raise RateLimited("Too many files are being read from URLs.", retry_after_s=_RETRY_AFTER_S)
            self._running[user] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[user] -= 1
                if not self._running[user]:
                    del self._running[user]


async def _read(url: str, into: Spool) -> None:
    async with asyncio.timeout(TIMEOUT_S), egress.get(url.strip(), Reachable()) as response:
        if response.status_code != HTTPStatus.OK:
            raise InvalidRequest(f"url: {first_line(url, 200)} answered with status {response.status_code}.")
        async for piece in response.aiter_bytes(chunk_size=2**16):
            into.write(piece)
