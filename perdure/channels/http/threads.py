"""Threads for blocking work beside an event loop, with few wake-ups.

Waking a thread or the loop costs more than a statement does, so work is handed over through one queue, and results that
come while the loop is busy return to it together.

Further threads wait for the interpreter's lock and for each other's commits, which costs more than it gains. So
`_FEW` threads serve the queue, and others only while work has waited for `_LOOK_S`: the few may all be in slow
statements.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_CLOSE_S = 1.0
_FEW = 4
_LOOK_S = 0.02

_Work = Callable[[], Any]
_Future = asyncio.Future[Any]
_Item = tuple[_Future, _Work]


class Threads:
    """At most `most` threads: up to `_FEW` that stay, and others while work waits. Belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads: list[threading.Thread] = []
        self._extra = 0
        self._waiting: SimpleQueue[_Item | None] = SimpleQueue()
        self._finished: deque[tuple[_Future, Any, BaseException | None] | None] = deque()
        self._under_way = 0
        self._handed_over = 0
        self._seen = 0
        self._looks = False
        self._loop_is_called = False

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, in a thread. It goes on if the caller is cancelled; its result is dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._under_way += 1
        self._handed_over += 1
        if self._under_way > len(self._threads):
            if len(self._threads) < min(_FEW, self._most):
                self._threads.append(self._start(f"gateway-{len(self._threads)}", self._serve))
            elif not self._looks:
                self._look_later(loop)
        self._waiting.put((future, work))
        return await future

    def close(self) -> None:
        """End the threads; one whose work hangs ends with the process."""
        for _ in range(len(self._threads) + self._extra):
            self._waiting.put(None)
        ends = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))
        self._threads.clear()

    def _start(self, name: str, serve: Callable[[asyncio.AbstractEventLoop], None]) -> threading.Thread:
        thread = threading.Thread(target=serve, args=(asyncio.get_running_loop(),), name=name, daemon=True)
        thread.start()
        return thread

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looks = True
        self._seen = self._handed_over
        loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Start further threads if work that waited at the last look waits still."""
        self._looks = False
        begun = self._handed_over - self._waiting.qsize()
        room = self._most - len(self._threads) - self._extra
        for _ in range(min(self._seen - begun, _FEW, room)):
            self._extra += 1
            self._start("gateway-extra", self._serve_while_any)
        if self._under_way > len(self._threads):
            self._look_later(asyncio.get_running_loop())

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._waiting.get()) is not None:
            self._do(item, loop)
            del item  # while this thread waits for more, it keeps none of them alive

    def _serve_while_any(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(Empty):
            while (item := self._waiting.get_nowait()) is not None:
                self._do(item, loop)
        self._finished.append(None)
        self._call(loop)

    def _do(self, item: _Item, loop: asyncio.AbstractEventLoop) -> None:
        future, work = item
        result, error = _outcome(work)
        self._finished.append((future, result, error))
        self._call(loop)

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._loop_is_called:
            self._loop_is_called = True
            with suppress(RuntimeError):  # the loop is closed: no caller is left
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._loop_is_called = False  # first: what is finished from now on calls again
        while self._finished:
            finished = self._finished.popleft()
            if finished is None:
                self._extra -= 1
                continue
            future, result, error = finished
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
