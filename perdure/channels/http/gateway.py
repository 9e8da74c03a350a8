"""What the requests of one gateway share.

Reading and writing the database blocks, so it happens in threads, as many as there are
connections; whoever waits for a turn holds none.

The way in closes before the gateway does: when it is told to leave, and while the fleet's
intake is closed, new messages are refused with 503 and a `Retry-After`, balancers are sent
elsewhere by `/readyz`, and whoever waits for a turn is given the time of a drain, then the
turn's present status.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from fastapi import Request, Response
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect

from perdure.channels.http.auth import Keys
from perdure.channels.http.threads import Threads
from perdure.errors import PerdureError, Unavailable
from perdure.runtime import Runtime
from perdure.turns import drain
from perdure.turns.reading import SettlementWatch

log = logging.getLogger(__name__)

_THREADS = 32
_LOOK_S = 0.25
_LEAVING = "This gateway is shutting down. Send the message again, to another one or a little later."
_CLOSED = "Nothing is taken in at the moment: the installation is being drained. Send the message again later."

T = TypeVar("T")


class Gateway:
    """The parts of the gateway's process. Belongs to one event loop."""

    def __init__(self, runtime: Runtime, keys: Keys) -> None:
        self.runtime = runtime
        self.keys = keys
        self._watch = SettlementWatch(runtime.database)
        self._leaving = False
        self._closed = False
        self._waits = 0
        self._waited = 0
        self._nobody_waits = asyncio.Event()
        self._nobody_waits.set()
        self._stopping = asyncio.Event()
        self._drained: asyncio.TimerHandle | None = None
        self._threads = Threads(_THREADS)

    def admit(self) -> None:
        """Each route that brings in work asks here first.

        Raises:
            Unavailable: nothing is taken in.
        """
        if self._leaving or self._closed:
            raise Unavailable(_LEAVING if self._leaving else _CLOSED, retry_after_s=self.runtime.settings.turn.sweep_s)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do blocking work beside the event loop."""
        return await self._threads.run(work)

    async def json_response(self, read: Callable[[], Any], status: int = 200) -> Response:
        """A response with what `read` returns, read and encoded in one thread.

        For answers that may be long, or that are read often: no model checks them on the event loop.
        """
        return await self.json_response_and_status(lambda: (read(), status))

    async def json_response_and_status(self, read: Callable[[], tuple[Any, int]]) -> Response:
        """As `json_response`; `read` returns the status, too."""

        def respond() -> Response:
            content, status = read()
            return Response(json.dumps(content, ensure_ascii=False).encode(), status, media_type="application/json")

        return await self.in_thread(respond)

    async def until_settled(self, turn_id: UUID, seconds: float, request: Request) -> None:
        """Return when the turn is settled, the time is up or the gateway stops.

        Raises:
            ClientDisconnect: nobody waits for the answer any more.
        """
        with self._waiting():
            await self._until_settled(turn_id, seconds, request)

    async def until(self, look: Callable[[], bool], seconds: float, request: Request) -> None:
        """Return when `look` returns True, the time is up or the gateway stops. Holds a thread only while it looks.

        Raises:
            ClientDisconnect: the client has closed the connection.
        """
        with self._waiting():
            ends = asyncio.get_running_loop().time() + seconds
            while not await self.in_thread(look) and (left_s := ends - asyncio.get_running_loop().time()) > 0:
                if await self._paused(min(_LOOK_S, left_s), request):
                    return

    async def _paused(self, seconds: float, request: Request) -> bool:
        """Wait; whether the gateway stops.

        Raises:
            ClientDisconnect: the client has closed the connection.
        """
        gone = asyncio.ensure_future(_disconnect(request))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((gone, stopping), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
            return stopping.done()
        finally:
            gone.cancel()
            stopping.cancel()

    async def follow_intake(self) -> None:
        """Look now and then whether the fleet's intake is closed, until cancelled."""
        look = partial(drain.is_closed, self.runtime.database)
        while True:
            try:
                closed = await self._threads.run(look)
            except (SQLAlchemyError, PerdureError) as error:
                log.warning("it is not known whether the intake is closed (%s)", error)
            else:
                if closed != self._closed:
                    self._turn(closed=closed)
            await asyncio.sleep(self.runtime.settings.turn.sweep_s)

    async def leave(self, hastened: asyncio.Event) -> None:
        """Take nothing in any more; return when nobody waits for a turn, or was told to come again.

        The first two of the four phases of a gateway's end, whose server sees to the others.
        """
        self._leaving = True
        before, began = self._waited, self.runtime.clock.monotonic()
        drain_s = self.runtime.settings.shutdown.drain_s
        log.info(
            "shutdown, 1 of 4: takes nothing in; %d requests wait for a turn, for at most %g s", self._waits, drain_s
        )
        ends = [asyncio.ensure_future(event.wait()) for event in (self._nobody_waits, hastened)]
        try:
            await asyncio.wait(ends, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in ends:
                future.cancel()
        log.info(
            "shutdown, 2 of 4: drained; %d waits are over, %d are answered with their turn's present status (%.3f s)",
            self._waited - before, self._waits, self.runtime.clock.monotonic() - began,
        )  # fmt: skip
        self._stopping.set()

    def _turn(self, *, closed: bool) -> None:
        """The intake was closed, or opened."""
        self._closed = closed
        if self._drained is not None:
            self._drained.cancel()
        if not closed:
            log.info("the intake is open again")
            if not self._leaving:
                self._stopping.clear()
            return
        drain_s = self.runtime.settings.shutdown.drain_s
        log.info("the intake is closed: %d requests wait for a turn, for at most %g s", self._waits, drain_s)
        self._drained = asyncio.get_running_loop().call_later(drain_s, self._stopping.set)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits += 1
        self._nobody_waits.clear()
        try:
            yield
        finally:
            self._waits -= 1
            self._waited += 1
            if not self._waits:
                self._nobody_waits.set()

    async def _until_settled(self, turn_id: UUID, seconds: float, request: Request) -> None:
        settled = asyncio.wrap_future(self._watch.settled(turn_id))
        gone = asyncio.ensure_future(_disconnect(request))
        stopping = asyncio.ensure_future(self._stopping.wait())
        waiting: tuple[asyncio.Future[Any], ...] = (settled, gone, stopping)
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Stop watching for settled turns, and end the threads."""
        self._watch.close()
        self._threads.close()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
