"""Limits on the gateway's connections, so that clients cannot hold idle connections or exhaust the file descriptors.

A connection has `HEADER_S` seconds for a request's header and `BODY_S` for its body. One address may have
`MOST_PER_ADDRESS` connections with an incomplete header, and the process may have `connection_limit()` connections.
If an address exceeds its limit, the server closes the address's oldest connection with an incomplete header. If the
process exceeds its limit, the server closes the oldest connection with an incomplete header, whatever its address.
Connections with a complete header do not count towards the limit of an address. The limit therefore does not affect
proxies and long streams.

`perdure gateway` serves with `protocol(door)` in place of uvicorn's protocol.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.channels.http.errors import problem
from perdure.channels.http.middleware import with_safe_headers
from perdure.errors import InvalidRequest

log = logging.getLogger(__name__)

HEADER_S = 10.0
"""Seconds for a request's header, from the opening of the connection; for later requests, from their first byte."""

BODY_S = 60.0
"""Seconds from the end of a request's header to the end of its body."""

MOST_PER_ADDRESS = 100
"""The most connections with an incomplete header from one address."""

_MOST = 10_000
_WANTED_DESCRIPTORS = 65_536
_RESERVED_DESCRIPTORS = 256
"""File descriptors reserved for the database's connections, Redis, logs and imports."""


class Phase(Enum):
    """The part of a request that the server waits for."""

    HEADER = "header"
    BODY = "body"


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
    """The most connections that a process may have if it may open `descriptors` files."""
    return min(_MOST, max(descriptors - _RESERVED_DESCRIPTORS, descriptors // 2))


class Door:
    """Tracks and limits the connections of one server. Belongs to one event loop.

    Args:
        most: The most open connections. Above this limit, the oldest connection with an incomplete header is closed.
        most_per_address: The most connections with an incomplete header from one address.
        limits_s: Seconds for each phase of a request.
    """

    def __init__(
        self, most: int, most_per_address: int = MOST_PER_ADDRESS, limits_s: dict[Phase, float] | None = None
    ) -> None:
        self.limits_s = _LIMITS_S if limits_s is None else limits_s
        self._most = most
        self._most_per_address = most_per_address
        self._open: set[GuardedProtocol] = set()
        self._incomplete: OrderedDict[GuardedProtocol, None] = OrderedDict()
        self._by_address: defaultdict[str, OrderedDict[GuardedProtocol, None]] = defaultdict(OrderedDict)

    def opened(self, connection: GuardedProtocol) -> None:
        """Add a new connection. Above a limit, close the oldest connection with an incomplete header."""
        self._open.add(connection)
        self.incomplete(connection)
        if len(self._open) > self._most:
            self._close_oldest(self._incomplete, f"more than {self._most} connections are open")

    def closed(self, connection: GuardedProtocol) -> None:
        """Remove a connection."""
        self._open.discard(connection)
        self.complete(connection)

    def incomplete(self, connection: GuardedProtocol) -> None:
        """Count a connection with an incomplete header. May close the oldest such connection of its address."""
        self._incomplete[connection] = None
        of_address = self._by_address[connection.address]
        of_address[connection] = None
        if len(of_address) > self._most_per_address:
            self._close_oldest(
                of_address,
                f"{connection.address} has more than {self._most_per_address} connections with an incomplete header",
            )

    def complete(self, connection: GuardedProtocol) -> None:
        """Stop counting a connection as incomplete."""
        self._incomplete.pop(connection, None)
        if (of_address := self._by_address.get(connection.address)) is not None:
            of_address.pop(connection, None)
            if not of_address:
                del self._by_address[connection.address]

    def _close_oldest(self, connections: OrderedDict[GuardedProtocol, None], reason: str) -> None:
        log.warning("closing the oldest connection with an incomplete header: %s", reason)
        oldest = next(iter(connections))
        oldest.abort()
        self.closed(oldest)  # the event loop calls `connection_lost` only in its next iteration


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
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._set_deadline(Phase.HEADER)
        self._door.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and its deadline."""
        self._set_deadline(None)
        self._door.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and set the deadline of the request's phase."""
        super().data_received(data)
        self._update_phase()

    def on_response_complete(self) -> None:
        """Set the deadline of the next request, which the buffer may already contain."""
        super().on_response_complete()
        self._update_phase()

    def abort(self) -> None:
        """Close the connection without a response."""
        self.transport.abort()

    def _update_phase(self) -> None:
        phase = None if self.transport.is_closing() else self._current_phase()
        if phase is self._phase:
            return
        self._set_deadline(phase)
        if phase is Phase.HEADER:
            self._door.incomplete(self)
        else:
            self._door.complete(self)

    def _current_phase(self) -> Phase | None:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return Phase.BODY
        if state is h11.IDLE and self.conn.trailing_data[0]:
            return Phase.HEADER
        return None  # between requests uvicorn's keep-alive timeout applies

    def _set_deadline(self, phase: Phase | None) -> None:
        self._phase = phase
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = (
            None if phase is None else self.loop.call_later(self._door.limits_s[phase], self._expire, phase)
        )

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


def protocol(door: Door) -> Callable[..., asyncio.Protocol]:
    """A factory for uvicorn: it makes one protocol object per connection, and `door` limits these connections."""
    return partial(GuardedProtocol, door)
