"""How fast the client of one request reads what it is sent.

A client has an allowance of `UNREAD_S` seconds in which the gateway waits for it. Waiting uses the allowance up. Each
`LEAST_READ` bytes that the client reads restore all of it, and time in which nothing waits for the client restores as
much of it. So an idle stream may stay open, and a client that goes on reading a little is cut off like one that reads
nothing.

`perdure.channels.http.middleware` sends with `Reader`, in any server. `perdure.cli.serve.connection_limits` applies the
same two limits to what the server itself has buffered.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

UNREAD_S = 30.0
"""Seconds that the gateway waits for a client that reads nothing."""

LEAST_READ = 2**18
"""The bytes that a client must read in `UNREAD_S` seconds while more waits for it: 9 kB/s, a slow modem's 70 kbit/s.

At this rate, a page of rows is read within the `UNREAD_S` seconds that other responses wait for its memory.
"""


class Unread(Exception):
    """The client has not read a piece of the response, or a frame, in time."""


class Reader:
    """The client of one request. Belongs to one event loop."""

    def __init__(self, unread_s: float = UNREAD_S) -> None:
        self._unread_s = unread_s
        self._left_s = unread_s
        self._at = asyncio.get_running_loop().time()
        self._waiting: dict[asyncio.Timeout, float] = {}
        """When each send that is under way began. A WebSocket may have several."""
        self.is_cut_off = False

    async def send(self, send: Send, message: Message, size: int) -> None:
        """Send `message`, whose body has `size` bytes.

        Raises:
            Unread: the client's allowance is used up, or the client was cut off.
        """
        if self.is_cut_off:
            raise Unread
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not self._waiting:
            self._restore(began - self._at)
        limit = asyncio.timeout(self._left_s)
        try:
            async with limit:
                self._waiting[limit] = began
                await send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unread from None
        finally:
            self._waiting.pop(limit, None)
            self._at = loop.time()
        self._left_s -= self._at - began
        self._restore(size * self._unread_s / LEAST_READ)

    def waited_s(self, now: float) -> float:
        """Seconds that the longest send has waited for the client; 0 if none waits."""
        return max((now - began for began in self._waiting.values()), default=0.0)

    def cut_off(self) -> None:
        """End what is being sent, and refuse to send more."""
        self.is_cut_off = True
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def _restore(self, seconds: float) -> None:
        self._left_s = min(self._unread_s, self._left_s + seconds)
