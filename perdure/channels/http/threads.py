"""Threads for the blocking work of an event loop, with few wake-ups.

Waking a thread or the loop takes longer than a database query. So all threads take work from one queue, and results
that are ready while the loop is busy are delivered together.

Usually `_USUAL` threads serve the queue. More threads would mostly wait for the interpreter's lock and for each other's
commits. If work has waited for `_CHECK_S` seconds, all these threads may be busy with slow queries, so more threads
start.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_CLOSE_S = 1.0
_USUAL = 4
_CHECK_S = 0.02

_Work = Callable[[], Any]
_Future = asyncio.Future[Any]
_Item = tuple[_Future, _Work]


class Threads:
    """A pool of at most `most` threads: `_USUAL` permanent ones, and more while work waits. For one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads: list[threading.Thread] = []
        self._extra = 0
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._finished: deque[tuple[_Future, Any, BaseException | None] | None] = deque()
        self._unfinished = 0
        self._submitted = 0
        self._submitted_at_check = 0
        self._check_scheduled = False
        self._delivery_scheduled = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; returns its result or raises its error. A cancelled caller's result is dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        work = partial(copy_context().run, work)
        self._unfinished += 1
        self._submitted += 1
        if self._unfinished > len(self._threads):
            if len(self._threads) < min(_USUAL, self._most):
                self._threads.append(self._start(f"gateway-{len(self._threads)}", self._serve))
            elif not self._check_scheduled:
                self._schedule_check(loop)
        self._queue.put((future, work))
        return await future

    def close(self) -> None:
        """End the threads, waiting `_CLOSE_S` seconds at most; a thread whose work hangs ends with the process."""
        for _ in range(len(self._threads) + self._extra):
            self._queue.put(None)
        ends = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))
        self._threads.clear()

    def _start(self, name: str, serve: Callable[[asyncio.AbstractEventLoop], None]) -> threading.Thread:
        thread = threading.Thread(target=serve, args=(asyncio.get_running_loop(),), name=name, daemon=True)
        thread.start()
        return thread

    def _schedule_check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check_scheduled = True
        self._submitted_at_check = self._submitted
        loop.call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        """Start more threads if work that waited at the last check is still waiting."""
        self._check_scheduled = False
        begun = self._submitted - self._queue.qsize()
        room = self._most - len(self._threads) - self._extra
        for _ in range(min(self._submitted_at_check - begun, _USUAL, room)):
            self._extra += 1
            self._start("gateway-extra", self._serve_until_empty)
        if self._unfinished > len(self._threads):
            self._schedule_check(asyncio.get_running_loop())

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._queue.get()) is not None:
            self._execute(item, loop)
            del item  # the waiting thread must not keep the work's objects alive

    def _serve_until_empty(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(Empty):
            while (item := self._queue.get_nowait()) is not None:
                self._execute(item, loop)
        self._finished.append(None)
        self._schedule_delivery(loop)

    def _execute(self, item: _Item, loop: asyncio.AbstractEventLoop) -> None:
        future, work = item
        result, error = _outcome(work)
        self._finished.append((future, result, error))
        self._schedule_delivery(loop)

    def _schedule_delivery(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            with suppress(RuntimeError):  # the loop is closed: no caller waits for the result
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._delivery_scheduled = False  # a result that becomes ready from now on schedules another delivery
        while self._finished:
            finished = self._finished.popleft()
            if finished is None:
                self._extra -= 1
                continue
            future, result, error = finished
            self._unfinished -= 1
            if future.done():  # its caller was cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _outcome(work: _Work) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except StopIteration as error:  # `Future.set_exception` rejects this error
        return None, RuntimeError(repr(error))
    except BaseException as error:  # noqa: BLE001 (any error is passed to the caller)
        return None, error
