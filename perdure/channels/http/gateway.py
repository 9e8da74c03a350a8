"""The state that all requests to one gateway process share.

Database queries block, so they run in a pool of threads. A request that waits for a turn occupies no thread.

An operator can close the intake of the whole fleet (`perdure.turns.drain`). While the intake is closed, and while the
gateway shuts down, the gateway refuses new messages with 503 and a `Retry-After`, and `/readyz` answers 503. Requests
that wait for a turn may wait `drain_s` seconds longer. The gateway then answers them with the turn's current status.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from uuid import UUID

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect, HTTPConnection

from perdure.access.tenants import UserKey
from perdure.channels.http.auth import Authenticate, Caller, Keys, MayApprove, authenticated
from perdure.channels.http.limits.reading import UNREAD_S
from perdure.channels.http.limits.shares import (
    CHUNKED_BYTES,
    MOST_BODIES,
    MOST_UPLOADS,
    TOO_MANY_BODIES,
    Newcomers,
    Shares,
    Unsent,
)
from perdure.channels.http.middleware import reader_of, resources_of
from perdure.channels.http.openai.side_requests import SideRequests
from perdure.channels.http.stream.follow import Follower
from perdure.channels.http.stream.hub import Hub
from perdure.channels.http.threads import Threads
from perdure.errors import NotFound, PerdureError, Unavailable, loggable
from perdure.events.event import Event, EventId
from perdure.runtime import Runtime
from perdure.turns import drain
from perdure.turns.cancel import cancel
from perdure.turns.committed import Committed, read_committed
from perdure.turns.reading import SettlementWatch, find_owner

log = logging.getLogger(__name__)

_MAX_THREADS = 32
_POLL_S = 0.25
_JSON = "application/json"
_BODY = "perdure.body"
"""The key in `request.scope` of the memory that `reserve_body` has reserved."""
_SHUTTING_DOWN = "This gateway is shutting down. Send the message again, to another gateway or a little later."
_CROWDED = "This gateway has too many open connections. Try again later."
_INTAKE_CLOSED = "This installation takes no messages while it is drained. Send the message again later."

T = TypeVar("T")


class Gateway:
    """The shared state of one gateway process. Belongs to one event loop.

    `authenticate` is the authentication of an application that mounts the gateway, used instead of `keys`.
    `may_approve` decides which users may decide about other users' calls, and about calls that staff approves.
    """

    def __init__(
        self,
        runtime: Runtime,
        keys: Keys,
        authenticate: Authenticate | None = None,
        may_approve: MayApprove | None = None,
    ) -> None:
        self.runtime = runtime
        self.keys = keys
        self.authenticate = authenticate
        self.may_approve = may_approve
        self._settlements = SettlementWatch(runtime.database)
        self._shutting_down = False
        self._intake_closed = False
        self._waiting_requests = 0
        self._finished_waits = 0
        self._no_request_waits = asyncio.Event()
        self._no_request_waits.set()
        self._stop_waiting = asyncio.Event()
        self._drained = asyncio.Event()
        self._drain_timer: asyncio.TimerHandle | None = None
        self._threads = Threads(_MAX_THREADS)
        self.side_requests = SideRequests(runtime)
        share = runtime.settings.stream.user_share
        self.requests = Shares(share, "requests and sockets")
        self.newcomers = Newcomers()
        self.is_crowded: Callable[[], bool] = lambda: False
        """Whether the server has room for short requests only; the server sets this."""
        self._streams = Shares(share, "streams")
        self._unsent = Unsent(UNREAD_S)
        self._bodies = Unsent(UNREAD_S, MOST_BODIES, MOST_BODIES // 2, refusal=TOO_MANY_BODIES)
        self.uploads = Shares(MOST_UPLOADS, "uploads")
        self._attending: Counter[UUID] = Counter()
        self._cancelling: set[asyncio.Task[Any]] = set()
        self._hub = Hub(runtime, self._threads, self._settlements.notify)

    async def caller(self, request: Request) -> Caller:
        """The caller that sent `request`.

        Raises:
            Unauthorized, RateLimited, Forbidden: as `Keys.caller` and `authenticated`.
        """
        if self.authenticate is not None:
            return await authenticated(self.authenticate, request)
        return self.keys.caller(request)

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return self.authenticate is None and self.keys.are_none

    def attend(self, request: Request, turn_id: UUID, cancels: Callable[[], bool] = lambda: False) -> None:
        """Count `request` among those that wait for a turn, until its response was sent or its client has left.

        The turn is then cancelled if `cancels` returns `True`, unless another request to this gateway waits for it.
        """
        self._attending[turn_id] += 1
        resources_of(request).callback(self._leave, turn_id, cancels)

    def _leave(self, turn_id: UUID, cancels: Callable[[], bool]) -> None:
        """Cancel an abandoned turn, in a thread. Cancels nothing while the gateway shuts down."""
        self._attending[turn_id] -= 1
        if self._attending[turn_id]:
            return
        del self._attending[turn_id]
        if self._shutting_down or not cancels():
            return
        task = asyncio.ensure_future(self.in_thread(partial(cancel, self.runtime, turn_id)))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelled)

    def _cancelled(self, task: asyncio.Task[Any]) -> None:
        self._cancelling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the turn of a client that has left is not cancelled: %s", loggable(error))

    def admit(self) -> None:
        """Check that the gateway accepts messages.

        Raises:
            Unavailable: the gateway is shutting down, or the intake is closed.
        """
        if self._shutting_down or self._intake_closed:
            reason = _SHUTTING_DOWN if self._shutting_down else _INTAKE_CLOSED
            raise Unavailable(reason, retry_after_s=self.runtime.settings.turn.sweep_s)

    def require_room(self) -> None:
        """Check that one more connection may stay open for long.

        Raises:
            Unavailable: the server keeps its last connections for short requests.
        """
        if self.is_crowded():
            raise Unavailable(_CROWDED, retry_after_s=self.runtime.settings.turn.sweep_s)

    async def reserve(self, request: Request, user: UserKey | None, size: int) -> None:
        """Wait until there are `size` bytes of memory for the response, and reserve them until it has been sent.

        Raises:
            RateLimited: the clients of `user`, or all clients, have too many unread responses.
        """
        resources_of(request).callback(await self._unsent.reserve(user, size, reader_of(request)))

    async def reserve_body(self, request: Request, user: UserKey | None, size: int) -> None:
        """Wait until there are `size` bytes of memory for a long body, and reserve them until its request ends.

        Raises:
            RateLimited: the clients of `user`, or all clients, send too many long bodies.
        """
        memory = resources_of(request).enter_context(ExitStack())
        memory.callback(await self._bodies.reserve(user, size, reader_of(request)))
        request.scope[_BODY] = memory

    @staticmethod
    def release_body(request: Request) -> None:
        """Release the memory of a long body, if any was reserved. The caller has forgotten what it has read."""
        if (memory := request.scope.get(_BODY)) is not None:
            memory.close()

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await self._threads.run(work)

    async def json_response(self, read: Callable[[], Any], status: int = 200) -> Response:
        """A JSON response with the result of `read`, which a thread reads and encodes.

        For long responses: the event loop does not encode them, and FastAPI does not validate them.
        """
        return await self.json_response_and_status(lambda: (read(), status))

    async def json_response_and_status(self, read: Callable[[], tuple[Any, int]]) -> Response:
        """Like `json_response`, but `read` returns the content and the status."""

        def respond() -> Response:
            content, status = read()
            return Response(json.dumps(content, ensure_ascii=False).encode(), status, media_type=_JSON)

        return await self.in_thread(respond)

    async def json_in_chunks(self, chunks: Iterator[str]) -> Response:
        """A JSON response whose text `chunks` makes in threads: each chunk when the client has read those before it.

        An error before the second chunk determines the response's status. A later one ends the connection.
        """
        begun = await self.in_thread(lambda: list(islice(chunks, 2)))
        if len(begun) < 2:  # noqa: PLR2004 (the whole text)
            return Response("".join(begun).encode(), media_type=_JSON)

        async def rest() -> AsyncGenerator[bytes, None]:
            while begun:
                yield begun.pop(0).encode()
            while (chunk := await self.in_thread(partial(next, chunks, None))) is not None:
                yield chunk.encode()

        return StreamingResponse(rest(), media_type=_JSON)

    async def events(
        self, connection: HTTPConnection, turn_id: UUID, last: EventId | None, pause_s: float
    ) -> AsyncGenerator[Event | None, None]:
        """The events of a turn after the position `last`, until the turn is settled or the gateway stops.

        Yields `None` after every `pause_s` seconds without an event. Memory is reserved for the events that were read
        and not yet sent on `connection`; an idle stream has none.

        Raises:
            NotFound: there is no such turn.
            RateLimited: too many streams are open, or too many responses unread, of the turn's user or in all.
            Unavailable: the database cannot be reached.
        """
        found = await self.in_thread(partial(find_owner, self.runtime.database, turn_id))
        if found is None:
            raise NotFound("There is no such turn.")

        async def read(turn_id: UUID, after: int) -> Committed:
            return await self.in_thread(partial(read_committed, self.runtime.database, turn_id, after))

        memory = partial(self._unsent.reserved, found[0], CHUNKED_BYTES, reader_of(connection))
        with self._streams.taken(found[0]), self._counted():
            async with aclosing(Follower(self._hub, read, turn_id, last, memory).events(pause_s)) as events:
                async for event in events:
                    yield event

    async def until_settled(self, turn_id: UUID, seconds: float, request: Request, *, or_asks: bool = False) -> None:
        """Wait until the turn is settled, `seconds` have passed or the gateway stops.

        `or_asks`: or until the turn waits for the client of a request.

        Raises:
            ClientDisconnect: the client has closed the connection.
            Unavailable: the server has room for short requests only.
        """
        self.require_room()
        with self._counted():
            self._settlements.is_notified = self._hub.connected
            settled = asyncio.wrap_future(self._settlements.settled(turn_id, or_asks=or_asks))
            await self._wait(seconds, request, settled)

    async def unless_left(self, request: Request, work: Awaitable[T]) -> T:
        """The result of `work`, which comes before the response to `request` begins.

        Raises:
            ClientDisconnect: the client has closed the connection; `work` was cancelled.
        """
        working, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            disconnected.cancel()
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def until(self, is_reached: Callable[[], bool], seconds: float, request: Request) -> None:
        """Wait until `is_reached` returns `True`, `seconds` have passed or the gateway stops. Polls in a thread.

        Raises:
            ClientDisconnect: the client has closed the connection.
        """
        with self._counted():
            ends = asyncio.get_running_loop().time() + seconds
            while not await self.in_thread(is_reached) and (left_s := ends - asyncio.get_running_loop().time()) > 0:
                await self._wait(min(_POLL_S, left_s), request)
                if self._stop_waiting.is_set():
                    return

    async def _wait(self, seconds: float, request: Request, *events: asyncio.Future[Any]) -> None:
        """Wait until one of `events` is done, `seconds` have passed or the gateway stops. Cancels `events`.

        Raises:
            ClientDisconnect: the client has closed the connection.
        """
        disconnected = asyncio.ensure_future(_disconnect(request))
        stopping = asyncio.ensure_future(self._stop_waiting.wait())
        futures = (*events, disconnected, stopping)
        try:
            await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if disconnected.done():
                raise ClientDisconnect
        finally:
            for future in futures:
                future.cancel()

    async def follow_intake(self) -> None:
        """Poll whether the fleet's intake is closed, every `turn.sweep_s` seconds, until cancelled."""
        is_closed = partial(drain.is_active, self.runtime.database)
        while True:
            try:
                closed = await self._threads.run(is_closed)
            except (SQLAlchemyError, PerdureError) as error:
                log.warning("cannot read whether the intake is closed (%s)", loggable(error))
            else:
                if closed != self._intake_closed:
                    self._on_intake(closed=closed)
            await asyncio.sleep(self.runtime.settings.turn.sweep_s)

    async def drain(self, hastened: asyncio.Event) -> None:
        """Refuse new messages, and let requests wait for their turns.

        Returns as soon as no request waits for a turn, `drain_s` seconds have passed, or `hastened` is set.

        The drain is phases 1 and 2 of a gateway's shutdown; `perdure.cli.serve.server` executes phases 3 and 4.
        """
        self._shutting_down = True
        before, began = self._finished_waits, self.runtime.clock.monotonic()
        drain_s = self.runtime.settings.shutdown.drain_s
        log.info(
            "shutdown, 1 of 4: refuses new messages; %d requests wait for a turn, for at most %g s",
            self._waiting_requests, drain_s,
        )  # fmt: skip
        ends = [asyncio.ensure_future(event.wait()) for event in (self._no_request_waits, hastened)]
        try:
            await asyncio.wait(ends, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in ends:
                future.cancel()
        log.info(
            "shutdown, 2 of 4: drained; %d waits ended, %d are answered with their turn's current status (%.3f s)",
            self._finished_waits - before, self._waiting_requests, self.runtime.clock.monotonic() - began,
        )  # fmt: skip
        self._stop_waiting.set()
        self._drained.set()
        self._hub.stop()

    def _on_intake(self, *, closed: bool) -> None:
        self._intake_closed = closed
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        if not closed:
            log.info("the intake is open again")
            if not self._shutting_down:
                self._stop_waiting.clear()
            return
        drain_s = self.runtime.settings.shutdown.drain_s
        log.info("the intake is closed: %d requests wait for a turn, for at most %g s", self._waiting_requests, drain_s)
        self._drain_timer = asyncio.get_running_loop().call_later(drain_s, self._stop_waiting.set)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the request as waiting while the `with` block runs."""
        self._waiting_requests += 1
        self._no_request_waits.clear()
        try:
            yield
        finally:
            self._waiting_requests -= 1
            self._finished_waits += 1
            if not self._waiting_requests:
                self._no_request_waits.set()

    async def stopped(self) -> None:
        """Wait until a shutdown has drained this gateway. A drain of the fleet does not end the wait."""
        await self._drained.wait()

    def start(self) -> None:
        self._hub.start()

    async def close(self) -> None:
        """Stop watching turns, and end the threads."""
        await self._hub.close()
        self.side_requests.close()
        self._settlements.close()
        self._threads.close()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
