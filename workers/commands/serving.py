"""Serving the gateway on an address, until a signal: requests under way are finished, waits end at once."""

from __future__ import annotations

import signal
import socket

import uvicorn
from fastapi import FastAPI

_FINISH_S = 5


class Server(uvicorn.Server):
    """uvicorn, which on its way out tells the gateway first, so that nobody waits for a turn meanwhile."""

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
                timeout_graceful_shutdown=_FINISH_S,
            )
        )
        self._gateway = app.state.gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully."""
        self._gateway.stop()
        await super().shutdown(sockets)


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve `app` until SIGINT or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn takes them over, and in the end raises them once more for whoever had them before.
        signal.signal(number, lambda _number, _frame: None)
    Server(app).run(sockets=[listener])
