"""Limits on the gateway's connections, so that clients cannot hold idle connections or exhaust the file descriptors.

A connection has `HEADER_S` seconds for a request's header and `BODY_S` for its body. It is *slow* if its header or body
has been incomplete for `SLOW_S` seconds. One address may have `MOST_PER_ADDRESS` connections with a slow header, and
the process may have `connection_limit()` connections. Above the first limit, the server closes the oldest slow
connection of the address. Above the second, it closes the oldest connection with a slow header, else the one that has
been idle the longest, else the oldest with a slow body. Whether a connection is new does not matter: a burst of
complete requests is served, whatever its size. Only if all connections are busy does a request get 503. The server
keeps a quarter of the connections for requests that do not last.

The number of connections is uvicorn's own, because uvicorn hands an upgraded connection to another protocol object, and
the first object is not notified of its end.

`Metered` counts what a client has read, for HTTP and WebSocket alike. The server resets a connection of which the
client reads neither all nor `LEAST_READ` bytes for `UNREAD_S` seconds, so that no client keeps memory by reading a
little now and then. If all connections together have more than `MOST_UNSENT` unsent bytes, it
resets those whose clients have not read for the longest time.

`perdure gateway` serves with `protocol(door)` in place of uvicorn's protocol, and with `shedding(app, door, …)`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sized
from contextlib import suppress
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.channels.http.errors import problem
from perdure.channels.http.limits.reading import LEAST_READ, UNREAD_S
from perdure.channels.http.middleware import with_safe_headers
from perdure.cli.serve.listening import ACCEPTED_AT_ONCE
from perdure.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

HEADER_S = 10.0
"""Seconds for a request's header, from the opening of the connection; for later requests, from their first byte."""

BODY_S = 60.0
"""Seconds from the end of a request's header to the end of its body."""

SLOW_S = 2.0
"""Seconds after which a connection with an incomplete header or body is slow; at most half of the time limit."""

MOST_PER_ADDRESS = 100
"""The most connections with a slow header from one address."""

MOST_UNSENT = 2**27
"""The most bytes that all connections together may have in their write buffers for longer than `_SWEEP_S` seconds."""

_MOST = 10_000
_WANTED_DESCRIPTORS = 65_536
_RESERVED_DESCRIPTORS = 256
"""File descriptors reserved for the database's connections, Redis, logs and imports."""

_HIGH_WATER_BYTES = 2**15
"""The write buffer of a connection above which a response waits until the client has read."""

_SWEEP_S = 1.0
_RESET = struct.pack("ii", 1, 0)
"""The value of `SO_LINGER` with which closing a socket discards its unsent bytes, and resets the connection."""


class Phase(Enum):
    """The part of a request that the server waits for. `IDLE`: for the next request."""

    HEADER = "header"
    BODY = "body"
    IDLE = "idle"


_LIMITS_S = {Phase.HEADER: HEADER_S, Phase.BODY: BODY_S}


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files, at most to the hard limit. Returns the new soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_WANTED_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a sandbox may forbid the change; the old limit then applies
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connection_limit(descriptors: int) -> int:
    return min(_MOST, max(descriptors - _RESERVED_DESCRIPTORS, descriptors // 2))


class Metered:
    """An asyncio transport that counts the bytes that its protocol has written.

    Both the protocol of HTTP and that of an upgraded connection write to this object.
    """

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self.written = 0
        self._read = 0
        self._read_at = now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    @property
    def is_closed(self) -> bool:
        """Whether the file descriptor is closed."""
        closed: bool = self._socket.fileno() == -1
        return closed

    def unread_s(self, now: float) -> float:
        """Seconds since the client had last read `LEAST_READ` bytes; 0 if nothing is unsent. Call it regularly."""
        unsent = self._transport.get_write_buffer_size()
        read = self.written - unsent
        if not unsent or read - self._read >= LEAST_READ:
            self._read, self._read_at = read, now
        return now - self._read_at

    @property
    def unsent(self) -> int:
        return 0 if self.is_closed else self._transport.get_write_buffer_size()

    def reset(self) -> None:
        """End the connection, and discard what is unsent here and in the system."""
        with suppress(OSError):  # the client has ended the connection
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()


class Door:
    """Tracks and limits the connections of one server. Belongs to one event loop.

    Args:
        most: The most open connections.
        most_per_address: The most connections with a slow header from one address.
        limits_s: Seconds for each phase of a request.
        unread_s: Seconds without progress after which an unread connection is reset.
        most_unsent: The most bytes in all write buffers together.
    """

    def __init__(
        self,
        most: int,
        most_per_address: int = MOST_PER_ADDRESS,
        limits_s: dict[Phase, float] | None = None,
        unread_s: float = UNREAD_S,
        most_unsent: int = MOST_UNSENT,
    ) -> None:
        self.limits_s = _LIMITS_S if limits_s is None else limits_s
        self.unread_s = unread_s
        self._most = most
        self._most_per_address = most_per_address
        self._most_unsent = most_unsent
        self._in_phase: dict[Phase, OrderedDict[GuardedProtocol, None]] = {phase: OrderedDict() for phase in Phase}
        self._slow: dict[Phase, OrderedDict[GuardedProtocol, None]] = {phase: OrderedDict() for phase in Phase}
        self._slow_by_address: defaultdict[str, OrderedDict[GuardedProtocol, None]] = defaultdict(OrderedDict)
        self._metered: set[Metered] = set()
        self._sweeps = False

    def opened(self, connection: GuardedProtocol, transport: Metered) -> None:
        """Add a new connection. Above the limit, close another one that waits for its client."""
        self._metered.add(transport)
        if not self._sweeps:
            self._sweeps = True
            connection.loop.call_later(_SWEEP_S, self._sweep, connection.loop)
        surplus = len(connection.connections) - self._most
        if surplus > 0 and not self._close_waiting() and surplus > ACCEPTED_AT_ONCE:
            self._close(self._in_phase[Phase.HEADER], "no file descriptors are left for new ones")

    def moved(self, connection: GuardedProtocol, phase: Phase | None) -> None:
        """Record the connection's phase. `None`: it is busy, closed or upgraded."""
        for waiting in (*self._in_phase.values(), *self._slow.values()):
            waiting.pop(connection, None)
        if (of_address := self._slow_by_address.get(connection.address)) is not None:
            of_address.pop(connection, None)
            if not of_address:
                del self._slow_by_address[connection.address]
        if phase is not None:
            self._in_phase[phase][connection] = None

    def slow(self, connection: GuardedProtocol, phase: Phase) -> None:
        """Record that a header or a body has been incomplete for long. May close a slow connection."""
        self._slow[phase][connection] = None
        if phase is Phase.HEADER:
            of_address = self._slow_by_address[connection.address]
            of_address[connection] = None
            if len(of_address) > self._most_per_address:
                reason = f"{connection.address} has more than {self._most_per_address} with an incomplete header"
                self._close(of_address, reason)
        if len(connection.connections) > self._most:
            self._close_waiting()

    def is_full(self, connections: Sized) -> bool:
        """Whether more connections are busy than may be open, so that a request must be refused."""
        return len(connections) - sum(map(len, self._in_phase.values())) > self._most

    def is_crowded(self, connections: Sized) -> bool:
        """Whether the last quarter of the connections is in use, which is for requests that do not last."""
        return len(connections) - sum(map(len, self._in_phase.values())) > self._most * 3 // 4

    def _close_waiting(self) -> bool:
        """Close the connection that waits for its client the longest; returns whether there was one."""
        for waiting in (self._slow[Phase.HEADER], self._in_phase[Phase.IDLE], self._slow[Phase.BODY]):
            if waiting:
                self._close(waiting, f"more than {self._most} are open")
                return True
        return False

    def _close(self, connections: OrderedDict[GuardedProtocol, None], reason: str) -> None:
        log.warning("closing the oldest connection that waits for its client: %s", reason)
        oldest = next(iter(connections))
        oldest.transport.abort()
        oldest.connections.discard(oldest)  # now: the event loop calls `connection_lost` only in its next iteration
        self.moved(oldest, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reset the connections whose clients do not read. Forget closed ones, which need not report their end."""
        now = loop.time()
        self._metered = {transport for transport in self._metered if not transport.is_closed}
        in_all = sum(transport.unsent for transport in self._metered)
        unread = {transport: seconds for transport in self._metered if (seconds := transport.unread_s(now))}
        for transport in sorted(unread, key=unread.__getitem__, reverse=True):
            if unread[transport] < self.unread_s and in_all <= self._most_unsent:
                break
            in_all -= transport.unsent
            log.warning("a client has read little for %.0f s: its connection is reset", unread[transport])
            transport.reset()
        loop.call_later(_SWEEP_S, self._sweep, loop)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a deadline for each phase of a request."""

    def __init__(self, door: Door, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._door = door
        self._phase: Phase | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it
        """Add the connection, and start the deadline of the first header."""
        metered = Metered(transport, self.loop.time())
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        super().connection_made(metered)  # type: ignore[arg-type]  # it has all of a transport's methods
        self.address = self.client[0] if self.client else ""
        self._enter(Phase.HEADER)
        self._door.opened(self, metered)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and its deadline."""
        self._enter(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and set the deadline of the request's phase."""
        super().data_received(data)
        self._update_phase()

    def on_response_complete(self) -> None:
        """Set the deadline of the next request, which the buffer may already contain."""
        super().on_response_complete()
        self._update_phase()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection to the WebSocket's protocol, which must answer the upgrade before the deadline."""
        metered: Any = self.transport  # see `connection_made`
        before = metered.written
        super().handle_websocket_upgrade(event)
        self._enter(None)
        self.loop.call_later(self._door.limits_s[Phase.HEADER], _end_if_silent, metered, before)

    def _update_phase(self) -> None:
        if self.transport.get_protocol() is not self:  # upgraded
            return
        phase = None if self.transport.is_closing() else self._current_phase()
        if phase is not self._phase:
            self._enter(phase)

    def _current_phase(self) -> Phase | None:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return Phase.BODY
        if state is h11.IDLE:
            return Phase.HEADER if self.conn.trailing_data[0] else Phase.IDLE
        return None

    def _enter(self, phase: Phase | None) -> None:
        self._phase = phase
        self._door.moved(self, phase)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if phase in self._door.limits_s:  # while idle, uvicorn's keep-alive timeout applies
            limit_s = self._door.limits_s[phase]
            slow_s = min(SLOW_S, limit_s / 2)
            self._deadline = self.loop.call_later(slow_s, self._slow_down, phase, limit_s - slow_s)

    def _slow_down(self, phase: Phase, left_s: float) -> None:
        self._deadline = self.loop.call_later(left_s, self._expire, phase)
        self._door.slow(self, phase)

    def _expire(self, phase: Phase) -> None:
        if self.transport.is_closing():
            return
        began = phase is Phase.BODY or bool(self.conn.trailing_data[0])
        if began:
            detail = f"The {phase.value} of the request did not arrive within {self._door.limits_s[phase]:g} s."
            self._respond(HTTPStatus.REQUEST_TIMEOUT, detail)
        self.transport.close()

    def send_400_response(self, _msg: str) -> None:
        """Respond to data that is not HTTP with the gateway's problem document instead of uvicorn's text."""
        self._respond(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP/1.1.")
        self.transport.close()

    def _respond(self, status: HTTPStatus, detail: str) -> None:
        answer = problem(status, InvalidRequest.code, detail, {"Connection": "close"})
        with suppress(h11.LocalProtocolError):  # the response to this request has begun
            response = h11.Response(status_code=status, headers=with_safe_headers(answer.raw_headers))
            for event in (response, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")


def _end_if_silent(transport: Metered, before: int) -> None:
    """End an upgraded connection whose header the WebSocket's protocol has rejected without an answer."""
    if transport.written == before:
        transport.abort()


def shedding(app: ASGIApp, door: Door, connections: Sized) -> ASGIApp:
    """`app`, but requests get 503 while more connections are busy than may be open. `/healthz` is answered always."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/healthz" or not door.is_full(connections):
            await app(scope, receive, send)
            return
        detail = "This gateway has too many open connections. Try again later."
        response = problem(
            HTTPStatus.SERVICE_UNAVAILABLE, Unavailable.code, detail, {"Connection": "close", "Retry-After": "1"}
        )
        response.raw_headers = with_safe_headers(response.raw_headers)
        await response(scope, receive, send)

    return serve


def protocol(door: Door) -> Callable[..., asyncio.Protocol]:
    """A factory for uvicorn: it makes one protocol object per connection, and `door` limits these connections."""
    return partial(GuardedProtocol, door)
