"""Coroutines of an agent's run on the event loop of the process, and the turn's thread as they see it.

The loop is that of the models of pydantic-ai (`models.adapted.event_loop`), because a model belongs to one loop. A run
differs from a model's call: its jobs write under the fence, and one that raises unwinds the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import queue
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from perdure.models.adapted.event_loop import running as running_loop
from perdure.turns.lease.tenure import LeaseLost, TurnScope

T = TypeVar("T")

_POLL_S = 0.2
"""Seconds between two checks whether the turn must stop."""

_ENDING_S = 2.0
"""Seconds for a cancelled coroutine to end. A coroutine that does not end runs on, detached from the turn."""


class Aborted(Exception):
    """A coroutine was cancelled by other code than perdure's, or raised an error that ends a process."""


class Running(Generic[T]):
    """A coroutine on the loop, in the context `context`. `ended` is called on the loop when it has ended."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        context: contextvars.Context | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = running_loop()
        self._task: asyncio.Task[T] | None = None
        self._result: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._cancelled = False
        self._ended = ended
        self._loop.call_soon_threadsafe(self._begin, work, context or contextvars.copy_context())

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the coroutine has ended; returns whether it has."""
        return bool(concurrent.futures.wait([self._result], timeout_s).done)

    def result(self) -> T:
        """The result of the coroutine, which has ended.

        Raises:
            asyncio.CancelledError: the coroutine was cancelled.
            Exception: the coroutine's error.
        """
        return self._result.result(0)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]], context: contextvars.Context) -> None:
        self._task = self._loop.create_task(work(), context=context)
        self._task.add_done_callback(self._finish)
        if self._cancelled:
            self._task.cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._result.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            # `SystemExit` must not end this process, or this thread, for a coroutine that raised it.
            self._result.set_exception(error if isinstance(error, Exception) else Aborted(type(error).__name__))
        else:
            self._result.set_result(task.result())
        self._ended()


class TurnThread:
    """Runs the jobs of a coroutine in the thread of the turn, which waits for the coroutine."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()

    async def do(self, job: Callable[[], T]) -> T:
        """Run `job` in the turn's thread, and return its result. If it raises, the coroutine is cancelled."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put((job, answer))
        return await answer

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], scope: TurnScope) -> T | None:
        """Run `work` on the loop, and its jobs in this thread; returns its result, or `None` if the turn is cancelled.

        Raises:
            LeaseLost: another worker has the session.
            Aborted: `work` was cancelled, or raised an error that ends a process.
            Exception: the error of `work` or of a job.
        """
        running = Running(work, ended=lambda: self._jobs.put(None))
        try:
            while True:
                try:
                    given = self._jobs.get(timeout=_POLL_S)
                except queue.Empty:
                    if scope.lost:
                        raise LeaseLost from None
                    if scope.cancelled:
                        return None
                    continue
                if given is None:
                    try:
                        return running.result()
                    except asyncio.CancelledError as error:
                        raise Aborted("CancelledError") from error
                job, answer = given
                found = job()
                running_loop().call_soon_threadsafe(_answer, answer, found)
        finally:
            running.cancel()
            running.wait(_ENDING_S)


def _answer(answer: asyncio.Future[Any], found: Any) -> None:
    if not answer.done():
        answer.set_result(found)
