"""The event loop that runs the `async def` tools, probes and hooks of a process.

One thread runs the loop. The first call in a process starts the thread; a forked child starts its own. The calling
thread waits for its coroutine, so effects, time limits and results are handled as for `def` tools. The loop cancels a
coroutine when no turn waits for it any longer: the time limit has passed, the turn is cancelled, or the turn's lease is
lost.

A coroutine that blocks the loop delays all other coroutines. A thread that waits for its coroutine detects the blocked
loop, and logs the name of the tool that blocks it. After a loop has been blocked for `_REPLACED_S` seconds, new calls
get a new loop. Calls on the blocked loop exceed their time limits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from perdure.tools import around

log = logging.getLogger(__name__)

_WATCH_S = 0.1
"""Seconds between two checks by `_watch` for calls that no turn waits for any longer."""

_BLOCKED_S = 1.0
"""If the loop does not run `_watch` for this many seconds, it counts as blocked."""

_REPLACED_S = 10.0


class CoroutineCancelled(Exception):
    """The call was cancelled.

    `unwanted` is True if no turn waits for the call any longer, and False if the called code cancelled itself.
    """

    def __init__(self, *, unwanted: bool) -> None:
        super().__init__("the call was cancelled")
        self.unwanted = unwanted


@dataclass(eq=False, slots=True)
class _Call:
    name: str
    is_over: Callable[[], bool]
    task: asyncio.Task[Any]
    unwanted: bool = False


class _Loop:
    """One event loop and its thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._calls: set[_Call] = set()
        self._seen_at = time.monotonic()
        self._reported = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="perdure-async-tools", daemon=True).start()

    @property
    def blocked_s(self) -> float:
        """Seconds for which a coroutine has blocked the loop; 0 if the loop is not blocked."""
        silent_s = time.monotonic() - self._seen_at
        return silent_s if silent_s > _BLOCKED_S else 0.0

    def submit(self, name: str, work: Coroutine[Any, Any, Any], is_over: Callable[[], bool]) -> Any:
        """Run `work` on the loop, and wait for its result.

        Raises:
            CoroutineCancelled: `work` was cancelled.
            BaseException: the error of `work`.
        """
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        context = contextvars.copy_context()
        self._loop.call_soon_threadsafe(lambda: self._begin(name, work, is_over, context, result))
        while True:
            try:
                return result.result(_BLOCKED_S)
            except concurrent.futures.TimeoutError:
                if result.done():  # `work` itself raised a TimeoutError, or ended just now
                    return result.result()
                self._report()

    def _begin(
        self,
        name: str,
        work: Coroutine[Any, Any, Any],
        is_over: Callable[[], bool],
        context: contextvars.Context,
        result: concurrent.futures.Future[Any],
    ) -> None:
        if is_over():  # the turn stopped waiting while another coroutine blocked the loop
            work.close()
            result.set_exception(CoroutineCancelled(unwanted=True))
            return
        call = _Call(name, is_over, self._loop.create_task(_contained(work), context=context))
        self._calls.add(call)

        def finish(task: asyncio.Task[Any]) -> None:
            self._calls.discard(call)
            if task.cancelled():
                result.set_exception(CoroutineCancelled(unwanted=call.unwanted))
            elif (error := task.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(task.result())

        call.task.add_done_callback(finish)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._watch())
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # raised by a task that a tool created
                log.warning("a task of an async tool raised %s; the event loop continues", type(error).__name__)

    async def _watch(self) -> None:
        while True:
            self._seen_at, self._reported = time.monotonic(), False
            for call in [each for each in self._calls if not each.unwanted and each.is_over()]:
                call.unwanted = True
                call.task.cancel()
            await asyncio.sleep(_WATCH_S)

    def _report(self) -> None:
        """Log which tool blocks the loop, once for each time that the loop is blocked."""
        if not self.blocked_s or self._reported:
            return
        self._reported = True
        running = asyncio.current_task(self._loop)
        name = next((each.name for each in [*self._calls] if each.task is running), "a coroutine")
        log.warning("%s blocks the event loop, so no other async tool runs: it should await, or be a plain def", name)


_lock = threading.Lock()
_current: _Loop | None = None


def call(name: str, work: Callable[[], Any], is_over: Callable[[], bool]) -> Any:
    """Call `work` in this thread, which must end after the call, and return its result.

    If `work` returns a coroutine, the event loop runs the coroutine, and cancels it as soon as `is_over` returns True.
    `work` may be a `functools.partial`. `name` appears in the log.

    Raises:
        CoroutineCancelled: the coroutine was cancelled, or not started because `is_over` returned True.
        Exception: the error of `work`.
    """
    if inspect.iscoroutinefunction(work) and is_over():
        raise CoroutineCancelled(unwanted=True)
    with around.surrounded(name, thread_ends=True):
        found = work()
        return _loop().submit(name, found, is_over) if inspect.iscoroutine(found) else found


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    """Await `work`. Raises a `RuntimeError` instead of an exception that would stop the event loop."""
    try:
        async with around.surrounded_coroutine():
            return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"it raised {type(error).__name__}") from error


def _loop() -> _Loop:
    global _current  # noqa: PLW0603 (one loop a process; replaced after a fork, and when it is blocked)
    with _lock:
        if _current is None or _current.pid != os.getpid() or _current.blocked_s > _REPLACED_S:
            _current = _Loop()
        return _current
