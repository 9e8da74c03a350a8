"""Serves the gateway on a socket until a signal.

A gateway shuts down in four phases, and logs a line for each:

    1  new messages get 503 with `Retry-After`
    2  drain: a waiting client gets a response when its turn is settled, or the turn's current status at the deadline
    3  responses are sent; a response that the client has not read within `FINISH_S` is cut off
    4  connections are closed; exit 0, or 1 if a response was cut off

After the first SIGINT, SIGTERM or SIGHUP the gateway keeps listening while clients wait for turns, at most for the
drain's time limit. A second signal ends the drain; a third signal cuts off responses. At the hard time limit the
process exits with status 1.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from perdure.channels.http.stream.websocket import MAX_FRAME_BYTES, PING_S
from perdure.cli.serve.connection_limits import Door, connection_limit, protocol, raise_descriptor_limit, shedding
from perdure.cli.serve.listening import ACCEPTED_AT_ONCE, BACKLOG, FINISH_S
from perdure.servers.process.stop_signals import stop_signals
from perdure.settings import ShutdownSettings
from perdure.workers import logs
from perdure.workers.shutdown.hard_limit import HardLimit

log = logging.getLogger(__name__)

_SWITCH_S = 0.001
"""Seconds after which a computing thread yields to the event loop (`sys.setswitchinterval`). Python's default: 5 ms."""


class GatewayServer(uvicorn.Server):
    """uvicorn's server, extended: the gateway drains before the server closes its sockets.

    `cut_off` is the number of connections whose response was cut off. `signalled_at` is the monotonic time of the
    first signal. `is_closed` tells whether the server has shut down.

    Args:
        app: The gateway's application.
        on_signal: Called at the first signal, in the signal handler.
        door: Limits the connections.
    """

    def __init__(self, app: FastAPI, on_signal: Callable[[], None], door: Door) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="websockets-sansio",
                ws_max_size=MAX_FRAME_BYTES,
                ws_ping_interval=PING_S,
                ws_ping_timeout=PING_S,
                http=protocol(door),  # type: ignore[arg-type]  # uvicorn only calls it, so a function will do
                backlog=ACCEPTED_AT_ONCE,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="on",
                timeout_graceful_shutdown=FINISH_S,
            )
        )
        connections = self.server_state.connections
        self.config.app = shedding(app, door, connections)
        self.signalled_at: float | None = None
        self.cut_off = 0
        self.is_closed = False
        self._gateway = app.state.gateway
        self._gateway.is_crowded = partial(door.is_crowded, connections)
        self._on_signal = on_signal
        self._signals = 0
        self._hurried = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen and serve."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has shortened the queue to ACCEPTED_AT_ONCE

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the gateway, then send the remaining responses and close the connections."""
        self._loop = asyncio.get_running_loop()
        if self._signals > 1:
            self._hurried.set()
        await self._gateway.drain(self._hurried)
        began, connections = time.monotonic(), len(self.server_state.connections)
        await super().shutdown(sockets)
        self.is_closed = True
        log.log(
            logging.WARNING if self.cut_off else logging.INFO,
            "shutdown, 3 of 4: closed %d connections, cut off %d of them (%.3f s)",
            connections, self.cut_off, time.monotonic() - began,
        )  # fmt: skip

    async def _wait_tasks_to_complete(self) -> None:
        """Wait until every response is sent; uvicorn cancels the wait after `FINISH_S` seconds."""
        try:
            await super()._wait_tasks_to_complete()
        finally:
            self.cut_off = len(self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown, the second ends the drain, the third cuts off responses."""
        self._signals += 1
        if not self.should_exit:
            self.signalled_at = time.monotonic()
            self._on_signal()
            super().handle_exit(sig, frame)
        elif self._loop is not None and not self._hurried.is_set():
            self._loop.call_soon_threadsafe(self._hurried.set)  # wakes the loop
        elif self._hurried.is_set():
            self.force_exit = True


def serve(app: FastAPI, listener: socket.socket, budget: ShutdownSettings, close: Callable[[], None]) -> int:
    """Serve `app` until one of `stop_signals` arrives, then call `close`. Returns the exit status."""
    logs.repeat_sparingly(
        "uvicorn.error",
        "asyncio",
        "perdure.channels.http.errors",
        "perdure.channels.http.middleware",
        "perdure.cli.serve.connection_limits",
    )
    door = Door(connection_limit(raise_descriptor_limit()))
    server = GatewayServer(app, HardLimit(budget.hard_exit_s).begin, door)
    _stop_at_signals(server)
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # full collections then skip the imported objects, which take tens of milliseconds to walk
    try:
        server.run(sockets=[listener])
    finally:
        began = time.monotonic()
        close()
    if server.signalled_at is not None:
        now = time.monotonic()
        log.info("shutdown, 4 of 4: closed (%.3f s; %.3f s in all)", now - began, now - server.signalled_at)
    return 1 if server.cut_off else 0


def _stop_at_signals(server: GatewayServer) -> None:
    """Install handlers that stop `server`. uvicorn replaces those of SIGINT and SIGTERM while it serves."""

    def stop(number: int, frame: FrameType | None) -> None:
        if not server.is_closed:  # otherwise uvicorn raises the signals again
            server.handle_exit(number, frame)

    for number in stop_signals():
        signal.signal(number, stop)
