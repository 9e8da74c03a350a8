"""The MCP connections of one process. One thread with one event loop serves all connections.

A process creates its `Connections` object when it starts, after any fork, and closes the object when it ends. The MCP
SDK is imported when the first server is opened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from perdure.clock import Clock
from perdure.resilience.registry import BreakerRegistry
from perdure.settings import Settings
from perdure.tools.mcp.server import McpServer, check
from perdure.tools.sources import RunnableTool

if TYPE_CHECKING:
    from perdure.tools.mcp.server_connection import ServerConnection

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds after which `close` kills the remaining server processes; longer than `stdio.END_S`."""

_STOP_S = 1.0


class Connections:
    """The connections to MCP servers, by the server's name. Threads may share one object."""

    def __init__(
        self,
        settings: Settings,
        breakers: BreakerRegistry,
        clock: Clock,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._breakers = breakers
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._connections: dict[str, ServerConnection] = {}
        self._tasks: list[Future[None]] = []
        self._process_groups: set[int] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def open(self, servers: Iterable[McpServer]) -> None:
        """Start connecting to each of `servers` that has no connection yet. Does not wait.

        Raises:
            SettingsError: the settings do not allow one of the servers.
        """
        wanted = list(servers)
        check(wanted, self._settings.mcp)
        with self._lock:
            for server in wanted:
                if server.name not in self._connections and not self._closed:
                    self._connections[server.name] = self._start(server)

    def tools(self, servers: Sequence[McpServer]) -> tuple[RunnableTool, ...]:
        """The tools of `servers`. Connects to the servers that have no connection yet.

        Waits until the first attempt to connect to each server has ended or timed out.
        """
        self.open(servers)
        connections = [connection for each in servers if (connection := self._connections.get(each.name)) is not None]
        return tuple(tool for connection in connections for tool in connection.tools())

    def close(self, within_s: float = CLOSE_S) -> None:
        """Close all connections and end all server processes, within `within_s` + 1 seconds."""
        with self._lock:
            self._closed = True
            thread, loop = self._thread, self._loop
        if thread is None or loop is None or not thread.is_alive():
            return
        for connection in self._connections.values():
            loop.call_soon_threadsafe(connection.end)
        late = wait(self._tasks, within_s).not_done
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_S)
        if late:
            from perdure.tools.mcp.stdio import kill  # noqa: PLC0415 (as in `_start`)

            log.warning("%d MCP servers did not end within %g s and are killed", len(late), within_s)
            for group in tuple(self._process_groups):
                kill(group)

    def _start(self, server: McpServer) -> ServerConnection:
        # The SDK takes a second to import, and most processes have no server.
        from perdure.tools.mcp.server_connection import ServerConnection  # noqa: PLC0415

        connection = ServerConnection(
            server,
            breaker=self._breakers.get(f"mcp:{server.name}"),
            clock=self._clock,
            jitter=self._jitter,
            timeout_s=self._settings.turn.tool_timeout_s,
            process_groups=self._process_groups,
        )
        task = asyncio.run_coroutine_threadsafe(connection.keep(), self._running())
        task.add_done_callback(_log_failure)
        self._tasks.append(task)
        return connection

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="perdure-mcp", daemon=True)
            self._thread.start()
        return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop):  # on exit, cancels the remaining tasks and waits for them
            loop.run_forever()


def _log_failure(task: Future[None]) -> None:
    """Log the error of a connection's task. An error is a bug: the task should run until the connection is closed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the task of an MCP connection failed", exc_info=error)
