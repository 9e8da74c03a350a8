"""Threads for blocking work beside an event loop, with few wake-ups.

Waking a thread or the loop costs more than a statement does, so work is handed over through one queue, and results that
come while the loop is busy return to it together.
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
    """At most `most` threads, started as they are needed. Belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[tuple[_Future, _Work] | None] = SimpleQueue()
        self._finished: deque[tuple[_Future, Any, BaseException | None]] = deque()
        self._under_way = 0
        self._loop_is_called = False

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, in a thread. It goes on if the caller is cancelled; its result is dropped."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._under_way += 1
        if self._under_way > len(self._threads) and len(self._threads) < self._most:
            self._start()
        self._waiting.put((future, work))
        return await future

    def close(self) -> None:
        """End the threads; one whose work hangs ends with the process."""
        for _ in self._threads:
            self._waiting.put(None)
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
        while (item := self._waiting.get()) is not None:
            future, work = item
            result, error = _outcome(work)
            self._finished.append((future, result, error))
            if not self._loop_is_called:
                self._loop_is_called = True
                with suppress(RuntimeError):  # the loop is closed: no caller is left
                    loop.call_soon_threadsafe(self._deliver)
            del item, future, work, result, error  # while this thread waits for more, it keeps none of them alive

    def _deliver(self) -> None:
        self._loop_is_called = False  # first: what is finished from now on calls again
        while self._finished:
            future, result, error = self._finished.popleft()
            self._under_way -= 1
            if future.done():  # cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _outcome(work: _Work) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except StopIteration as error:  # a future takes any error but this
        return None, RuntimeError(repr(error))
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the caller's)
        return None, error
