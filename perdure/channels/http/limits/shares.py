"""What one user, or one address, may hold open in one gateway, and the memory for responses that are being sent.

No user may take all of a process's streams, sockets or memory. The classes belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from perdure.access.tenants import UserKey
from perdure.channels.http.limits.reading import Reader
from perdure.errors import RateLimited

MOST_UNSENT = 2**28
"""The most bytes of memory that a process reserves for unread responses."""

MOST_UNSENT_OF_USER = 2**24
"""The most bytes of memory that a process reserves for unread responses of one user."""

MOST_BODIES = 2**29
"""The most bytes of memory that a process reserves for long bodies; a user has half of them at most."""

MOST_UPLOADS = 4
"""The most files that one user uploads to a process at a time, each in a temporary file."""

CHUNKED_BYTES = 2**20
"""The memory of a response that is made in chunks: about two pages of rows, and their text."""

SLOW_S = 1.0
"""Seconds for a piece of 64 KiB, after which a client is slow: it is cut off if its memory is needed for others."""

MOST_NEWCOMERS = 500
"""The most sockets of a process that have not authenticated yet."""

_RETRY_AFTER_S = 5.0
_UNREAD = "Too many responses are not read yet. Read them, then try again."
TOO_MANY_BODIES = "Too many long bodies are being sent. Send fewer at once, or upload files with POST /v1/files."
"""The error of a long body for which there is no memory."""


class Shares:
    """Counts what each user holds open, and limits it to `share`. `what` names it in the error."""

    def __init__(self, share: int, what: str) -> None:
        self._share = share
        self._what = what
        self._held: Counter[UserKey] = Counter()

    @contextmanager
    def taken(self, user: UserKey | None) -> Iterator[None]:
        """Count one more of the user while the `with` block runs. `None` is not limited.

        Raises:
            RateLimited: the user holds the whole share.
        """
        if user is None:
            yield
            return
        if self._held[user] >= self._share:
            raise RateLimited(
                f"This user has {self._share} open {self._what} at this gateway. Close one, or try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._held[user] += 1
        try:
            yield
        finally:
            self._held[user] -= 1
            if not self._held[user]:
                del self._held[user]


class Newcomers:
    """The sockets that have not authenticated yet, at most `most`.

    Beyond the limit, the oldest one of the address with the most newcomers ends. A proxy's address may have all of
    them: sockets that authenticate at once are not the oldest.
    """

    def __init__(self, most: int = MOST_NEWCOMERS) -> None:
        self._most = most
        self._by_address: defaultdict[str, OrderedDict[asyncio.Timeout, None]] = defaultdict(OrderedDict)

    @contextmanager
    def taken(self, address: str, limit: asyncio.Timeout) -> Iterator[None]:
        """Count a newcomer while the `with` block runs. To end it, its time limit is moved to the present."""
        if sum(map(len, self._by_address.values())) >= self._most:
            oldest, _ = max(self._by_address.values(), key=len).popitem(last=False)
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        self._by_address[address][limit] = None
        try:
            yield
        finally:
            self._by_address[address].pop(limit, None)
            if not self._by_address[address]:
                del self._by_address[address]


@dataclass(eq=False, slots=True)
class _Place:
    """Memory that is reserved for what one client is sent."""

    user: UserKey | None
    size: int
    reader: Reader


class _Reserved(AbstractAsyncContextManager[None]):
    """No generator: a server that stops closes all generators at once, and this one before the one that uses it."""

    def __init__(self, reserve: Callable[[], Awaitable[Callable[[], None]]]) -> None:
        self._reserve = reserve

    async def __aenter__(self) -> None:
        self._release = await self._reserve()

    async def __aexit__(self, *_: object) -> None:
        self._release()


class Unsent:
    """Memory for responses that are being sent, or for long bodies that are being read; `refusal` is the error's text.

    A response or body waits until there is room for it, `wait_s` at most.

    If all memory is reserved, the clients that have kept the gateway waiting for the longest time, `slow_s` seconds at
    least, are cut off. So clients that read slowly, however many, do not keep a client that reads from being served.
    """

    def __init__(
        self,
        wait_s: float,
        most: int = MOST_UNSENT,
        most_of_user: int = MOST_UNSENT_OF_USER,
        slow_s: float = SLOW_S,
        refusal: str = _UNREAD,
    ) -> None:
        self._wait_s = wait_s
        self._refusal = refusal
        self._most = most
        self._most_of_user = most_of_user
        self._slow_s = slow_s
        self._places: set[_Place] = set()
        self._reserved: Counter[UserKey | None] = Counter()
        self._in_all = 0
        self._released = asyncio.Event()

    async def reserve(self, user: UserKey | None, size: int, reader: Reader) -> Callable[[], None]:
        """Reserve `size` bytes for what `reader` is sent; returns the function that releases them.

        `user`: `None` is not limited to one user's share.

        Raises:
            RateLimited: the user's other responses, or those of all users, are not read within `wait_s` seconds.
        """
        place = _Place(user, min(size, self._most_of_user), reader)
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._has_room(place):
                    await self._wait_for_room(place)
        except TimeoutError:
            raise RateLimited(self._refusal, retry_after_s=_RETRY_AFTER_S) from None
        self._places.add(place)
        self._reserved[user] += place.size
        self._in_all += place.size
        return partial(self._release, place)

    def reserved(self, user: UserKey | None, size: int, reader: Reader) -> AbstractAsyncContextManager[None]:
        """Like `reserve`, while the `with` block runs."""
        return _Reserved(partial(self.reserve, user, size, reader))

    def _has_room(self, place: _Place) -> bool:
        return self._has_share(place) and self._in_all + place.size <= self._most

    def _has_share(self, place: _Place) -> bool:
        return place.user is None or self._reserved[place.user] + place.size <= self._most_of_user

    async def _wait_for_room(self, place: _Place) -> None:
        """Wait for a release. If the user's share has room, first cut off slow clients of any user."""
        released = self._released
        if not self._has_share(place):
            await released.wait()
            return
        self._cut_off_slow(self._in_all + place.size - self._most)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._slow_s / 4):
                await released.wait()

    def _cut_off_slow(self, lacking: int) -> None:
        """Cut off the slowest clients, until `lacking` bytes are or will be released."""
        now = asyncio.get_running_loop().time()
        lacking -= sum(place.size for place in self._places if place.reader.is_cut_off)
        waited_s = {place: place.reader.waited_s(now) for place in self._places if not place.reader.is_cut_off}
        for place in sorted(waited_s, key=waited_s.__getitem__, reverse=True):
            if lacking <= 0 or waited_s[place] < self._slow_s:
                return
            place.reader.cut_off()
            lacking -= place.size

    def _release(self, place: _Place) -> None:
        self._places.remove(place)
        self._in_all -= place.size
        self._reserved[place.user] -= place.size
        if not self._reserved[place.user]:
            del self._reserved[place.user]
        self._released.set()  # wakes those who wait
        self._released = asyncio.Event()
