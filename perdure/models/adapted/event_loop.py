"""The event loop of the process, on which the models and the agents of pydantic-ai run.

Their connections belong to one event loop, so each process has exactly one, in a thread of its own. The loop starts at
the first use. A forked child starts its own. perdure's threads submit work with `run`, and wait for it. The work runs
on the loop; whatever may block, such as a commit or the publication of streamed text, it passes to the waiting thread.

Nothing on the loop may block: all calls of the process share it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import anyio.to_thread

from perdure.models.protocol import CallAborted, ModelCall

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_CLOSE_S = 2.0
"""Maximum seconds in which the tasks of the loop end when the process ends."""

THREADS = 1000
"""Maximum threads of anyio, in which pydantic-ai calls synchronous clients and tools. Its own default is 40."""

_Job = Callable[[], object]


class WaitingThread:
    """The thread that waits in `run`, as its work on the event loop sees it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Sequence[_Job] | None] = SimpleQueue()
        self._posted: list[_Job] = []

    def post(self, job: _Job) -> None:
        """Let the thread call `job`, and do not wait. Jobs run in order. If one raises, the work is cancelled.

        The jobs of one iteration of the loop, such as the deltas of one packet, wake the thread once.
        """
        self._posted.append(job)
        if len(self._posted) == 1:
            asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        if self._posted:
            self._jobs.put(self._posted)
            self._posted = []

    def work_until_done(self, work: Future[Result], call: ModelCall) -> Result:
        work.add_done_callback(lambda _: self._jobs.put(None))
        try:
            with call.aborting(lambda: _cancel(work)):
                while True:
                    try:
                        jobs = self._jobs.get(timeout=call.remaining())
                    except Empty:
                        continue  # `remaining` raises
                    if jobs is None:
                        return work.result()
                    for job in jobs:
                        job()
        except CancelledError as error:
            raise CallAborted("The process ends.") from error
        finally:
            work.cancel()


def _cancel(work: Future[Any]) -> None:
    work.cancel()


def run(work: Callable[[WaitingThread], Coroutine[Any, Any, Result]], call: ModelCall) -> Result:
    """Run `work` on the event loop of the process, and wait for its result.

    If `call` ends, the task of `work` is cancelled. The thread does not wait until the task has ended.

    Raises:
        CallAborted, DeadlineExceeded: `call` is over.
        Exception: `work` raised it, or a job that it posted.
    """
    call.remaining()
    waiting = WaitingThread()
    return waiting.work_until_done(asyncio.run_coroutine_threadsafe(work(waiting), running()), call)


class _Process:
    """The loop of this process, if it has started."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self.resources: WeakSet[Resource] = WeakSet()


_process = _Process()
_of_parents: list[_Process] = []


def running() -> asyncio.AbstractEventLoop:
    """The loop of this process, which is started if necessary."""
    process = _process
    with process.lock:
        if process.loop is None:
            process.loop = asyncio.new_event_loop()
            process.thread = threading.Thread(
                target=_serve, args=(process.loop,), name="perdure-event-loop", daemon=True
            )
            process.thread.start()
        return process.loop


async def _raise_limit_of_threads() -> None:
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    first = loop.create_task(_raise_limit_of_threads())  # not `run_until_complete`: work may exit from the first moment
    first.add_done_callback(asyncio.Task.result)
    try:
        while not _ran_to_its_end(loop):
            pass
    finally:
        loop.close()


def _ran_to_its_end(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:
        # asyncio raises it out of the loop when a task ends with it. The task has it as its error, too.
        log.exception("work on the event loop raised %s: all other work goes on", type(error).__name__)
        return False
    return True


class Resource(Protocol):
    """Something whose connections belong to the loop."""

    async def aclose(self) -> None: ...


def keep(resource: Resource) -> None:
    """Close `resource` when the loop ends, unless it is garbage by then."""
    _process.resources.add(resource)


def release(resource: Resource) -> None:
    """Close `resource`, and do not wait."""
    process = _process
    with process.lock:
        if process.loop is not None:
            asyncio.run_coroutine_threadsafe(resource.aclose(), process.loop)


def close() -> None:
    """End all work on the loop, and the loop. The next use starts another one."""
    process = _process
    with process.lock:
        loop, thread = process.loop, process.thread
        process.loop = process.thread = None
        resources, process.resources = process.resources, WeakSet()
    if loop is None or thread is None:
        return
    ended = asyncio.run_coroutine_threadsafe(_end(loop, list(resources)), loop)
    ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    thread.join(_CLOSE_S)


async def _end(loop: asyncio.AbstractEventLoop, resources: list[Resource]) -> None:
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_S / 2)
    for resource in resources:
        await resource.aclose()
    await loop.shutdown_asyncgens()


def _forget() -> None:
    # The child keeps the parent's loop alive: closing its copy would change the parent's epoll set.
    global _process  # noqa: PLW0603 (the state of the process)
    _of_parents.append(_process)
    _process = _Process()


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
