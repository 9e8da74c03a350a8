"""What one user, or one address, may hold open in one gateway, and the memory for responses that are being sent.

No user may take all of a process's streams, sockets or memory. The classes belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from perdure.errors import RateLimited

MOST_UNSENT = 2**28
"""The most bytes of memory that a process reserves for unread responses."""

MOST_UNSENT_OF_USER = 2**24
"""The most bytes of memory that a process reserves for unread responses of one user."""

CHUNKED_BYTES = 2**20
"""The memory of a response that is made in chunks: about two pages of rows, and their text."""

MOST_NEWCOMERS = 500
"""The most sockets of a process that have not authenticated yet."""

_RETRY_AFTER_S = 5.0


class Shares:
    """Counts what each user holds open, and limits it to `share`. `what` names it in the error."""

    def __init__(self, share: int, what: str) -> None:
        self._share = share
        self._what = what
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, user: str | None) -> Iterator[None]:
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
    def held(self, address: str, limit: asyncio.Timeout) -> Iterator[None]:
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


class Unsent:
    """Memory for responses that are being sent. A response waits until there is room for it, `wait_s` at most."""

    def __init__(self, wait_s: float, most: int = MOST_UNSENT, most_of_user: int = MOST_UNSENT_OF_USER) -> None:
        self._wait_s = wait_s
        self._most = most
        self._most_of_user = most_of_user
        self._reserved: Counter[str | None] = Counter()
        self._in_all = 0
        self._released = asyncio.Event()

    async def reserve(self, user: str | None, size: int) -> Callable[[], None]:
        """Reserve `size` bytes; returns the function that releases them. `None`: no single user's memory.

        Raises:
            RateLimited: the user's other responses, or those of all users, are not read within `wait_s` seconds.
        """
        size = min(size, self._most_of_user)
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._has_room(user, size):
                    await self._released.wait()
        except TimeoutError:
            raise RateLimited(
                "Too many responses are not read yet. Read them, then try again.", retry_after_s=_RETRY_AFTER_S
            ) from None
        self._reserved[user] += size
        self._in_all += size
        return partial(self._release, user, size)

    def _has_room(self, user: str | None, size: int) -> bool:
        of_user = 0 if user is None else self._reserved[user]
        return of_user + size <= self._most_of_user and self._in_all + size <= self._most

    def _release(self, user: str | None, size: int) -> None:
        self._in_all -= size
        self._reserved[user] -= size
        if not self._reserved[user]:
            del self._reserved[user]
        self._released.set()  # wakes those who wait
        self._released = asyncio.Event()
