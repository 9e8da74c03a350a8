"""Threads for the blocking work of an event loop, with few wake-ups.

Waking a thread or the loop takes longer than a statement does. So all threads take work from one queue, and results
that arrive while the loop is busy are delivered together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_CLOSE_S = 1.0

_Work = Callable[[], Any]
_Future = asyncio.Future[Any]


class Threads:
    """At most `max_threads` threads, started as they are needed. Belongs to one event loop."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[_Future, _Work] | None] = SimpleQueue()
        self._finished: deque[tuple[_Future, Any, BaseException | None]] = deque()
        self._unfinished = 0
        self._delivery_scheduled = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; what it returns or raises. If the caller is cancelled, the result is dropped."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._unfinished += 1
        if self._unfinished > len(self._threads) and len(self._threads) < self._max_threads:
            self._start()
        self._queue.put((future, work))
        return await future

    def close(self) -> None:
        """End the threads; a thread whose work hangs ends with the process."""
        for _ in self._threads:
            self._queue.put(None)
        ends = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))
        self._threads.clear()

    def _start(self) -> None:
        name = f"gateway-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, args=(asyncio.get_running_loop(),), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            result, error = _outcome(work)
            self._finished.append((future, result, error))
            if not self._delivery_scheduled:
                self._delivery_scheduled = True
                with suppress(RuntimeError):  # the loop is closed: no caller is left
                    loop.call_soon_threadsafe(self._deliver)
            del item, future, work, result, error  # or the waiting thread would keep them alive

    def _deliver(self) -> None:
        self._delivery_scheduled = False  # first: a result that is ready from now on calls the loop again
        while self._finished:
            future, result, error = self._finished.popleft()
            self._unfinished -= 1
            if future.done():  # cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _outcome(work: _Work) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except StopIteration as error:  # a future refuses this one
        return None, RuntimeError(repr(error))
    except BaseException as error:  # noqa: BLE001 (the caller gets every error)
        return None, error
