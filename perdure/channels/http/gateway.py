"""What the requests of one gateway share.

Reading and writing the database blocks, so it happens in threads, as many as there are
connections; whoever waits for a turn holds none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar
from uuid import UUID

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request, Response
from starlette.requests import ClientDisconnect

from perdure.channels.http.auth import Caller, Keys
from perdure.runtime import Runtime
from perdure.turns.reading import SettlementWatch

_THREADS = 32

T = TypeVar("T")


class Gateway:
    """The parts of the gateway's process. Belongs to one event loop."""

    def __init__(self, runtime: Runtime, keys: Keys) -> None:
        self.runtime = runtime
        self.keys = keys
        self._watch = SettlementWatch(runtime.database)
        self._stopping = asyncio.Event()
        self._threads = CapacityLimiter(_THREADS)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do blocking work beside the event loop."""
        return await to_thread.run_sync(work, limiter=self._threads)

    async def answer(self, work: Callable[[], Any], status: int = 200) -> Response:
        """A response with what `work` returns as JSON; both happen in a thread."""
        body = await self.in_thread(lambda: json.dumps(work(), ensure_ascii=False).encode())
        return Response(body, status, media_type="application/json")

    async def until_settled(self, turn_id: UUID, seconds: float, request: Request) -> None:
        """Return when the turn is settled, the time is up or the gateway stops.

        Raises:
            ClientDisconnect: nobody waits for the answer any more.
        """
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

    def stop(self) -> None:
        """Answer whoever waits for a turn with its present status, now and from now on."""
        self._stopping.set()

    def close(self) -> None:
        """Stop watching for settled turns."""
        self._watch.close()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _gateway(request: Request) -> Gateway:
    found: Gateway = request.app.state.gateway
    return found


TheGateway = Annotated[Gateway, Depends(_gateway)]


async def _caller(request: Request, gateway: TheGateway) -> Caller:
    return gateway.keys.caller(request)


TheCaller = Annotated[Caller, Depends(_caller)]
"""A route that declares it is for callers with a key (or, on loopback without keys, for any)."""
