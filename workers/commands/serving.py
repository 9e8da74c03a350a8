"""Serving the gateway on an address, until a signal: what is new is refused, what runs is finished.

On the first SIGINT or SIGTERM the gateway goes on listening for as long as somebody waits for
a turn, at most for the drain's budget; a second one has those answered at once; a third one
breaks off whatever is still being sent.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from workers.commands.listening import FINISH_S


class Server(uvicorn.Server):
    """uvicorn, which on its way out lets the gateway finish before it closes its sockets."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="on",
                timeout_graceful_shutdown=FINISH_S,
            )
        )
        self._gateway = app.state.gateway
        self._hastened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully."""
        self._loop = asyncio.get_running_loop()
        await self._gateway.leave(self._hastened)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down, hasten, break off."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif self._loop is not None and not self._hastened.is_set():
            self._loop.call_soon_threadsafe(self._hastened.set)  # the loop may be asleep
        elif self._hastened.is_set():
            self.force_exit = True


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve `app` until SIGINT or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn takes them over, and in the end raises them once more for whoever had them before.
        signal.signal(number, lambda _number, _frame: None)
    Server(app).run(sockets=[listener])
