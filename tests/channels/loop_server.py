"""A server of aiohttp on a free port of loopback, in a thread of its own: the base of the fake chat services."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

T = TypeVar("T")

_PATIENCE_S = 20.0


class LoopServer:
    """Serves `application` until `close`."""

    def __init__(self, application: web.Application) -> None:
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self.do(self._start())

    def close(self) -> None:
        """Stop serving."""
        self.do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the server's event loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    def until(self, condition: Any, what: str) -> None:
        """Wait until `condition()` is true. The condition is checked after each request of the bot."""
        with self._changed:
            assert self._changed.wait_for(condition, _PATIENCE_S), f"not seen: {what}"

    def _note(self, where: list[Any], what: Any) -> None:
        with self._changed:
            where.append(what)
            self._changed.notify_all()

    async def _start(self) -> int:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])
