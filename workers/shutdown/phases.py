"""The shutdown of a worker, in four phases with a log line each.

    1  stop: the worker stops consuming and returns prefetched messages (`perdure.workers.consumer.pause`)
    2  drain: running turns continue. At the deadline the worker parks turns that wait for a model
       (`perdure.turns.run.loop`), releases their sessions, publishes a wake-up for each session, and waits for running
       tools
    3  flush: the worker writes to PostgreSQL the turns that only Redis has (`perdure.workers.shutdown.flush`)
    4  close: the worker releases the remaining leases, closes connections and exits with status 0

One thread enforces the time limits. It waits for the next shutdown request, the end of the process, or the deadline.
Shortly before the hard limit, the thread releases all leases and wakes other workers. At the hard limit, the process
exits by `os._exit` with status 1, even if other threads hang.

The first request, usually a signal, begins the shutdown. The second request ends the drain at once, and does not move
the hard limit. The third request makes the process exit at once, as at the hard limit.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from perdure.errors import Unavailable, loggable
from perdure.sessions.states import State
from perdure.settings import ShutdownSettings
from perdure.tasks.process import Process
from perdure.turns.inbox.incoming import DEFAULT_PRIORITY
from perdure.turns.run.leave import Turns
from perdure.workers.consumer.pause import Consumption
from perdure.workers.isolated.child import Isolation
from perdure.workers.shutdown.flush import flush
from perdure.workers.shutdown.hard_limit import exit_in

log = logging.getLogger(__name__)

_RELEASE_S = 3.0
"""Seconds between the release of the leases and the hard limit; at most a third of the hard limit."""

_EXIT_S = 0.5
"""Seconds of `_RELEASE_S` that are reserved for the exit itself, after the wait for child processes."""


_LOOK_S = 0.5
"""Seconds between two checks for running tasks of the application."""


class _Event(Enum):
    REQUESTED = auto()
    ENDED = auto()


class Shutdown:
    """The shutdown of one worker process.

    `others` returns the number of running tasks of the application that shares the worker. The shutdown waits for these
    tasks without a limit, as Celery does.
    """

    def __init__(
        self,
        budget: ShutdownSettings,
        isolation: Isolation,
        consumption: Consumption,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self.requested = False
        self.begun = threading.Event()
        self._hard = False
        self._budget = budget
        self._isolation = isolation
        self._consumption = consumption
        self._others = others
        # SimpleQueue: `put` may be called in a signal handler, even in one that interrupts another.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._began = 0.0
        self._before = Turns()

    def request(self) -> None:
        """Begin the shutdown, or shorten it if it has begun. Safe in a signal handler."""
        self.requested = True
        self._events.put(_Event.REQUESTED)

    def run(self, process: Process) -> None:
        """Wait for a request, then enforce the time limits. Exits the process if the shutdown does not end in time."""
        self._next(None)
        self._began = time.monotonic()
        self._before = process.runner.turns()
        self.begun.set()
        self._consumption.wake()
        keeper = process.runner.keeper
        running = keeper.turns + self._isolation.running
        drain_s, hard_exit_s = self._budget.drain_s, self._budget.hard_exit_s
        log.info("shutdown: %d turns run; %g s to drain, %g s at most", running, drain_s, hard_exit_s)
        release_at_s = hard_exit_s - min(_RELEASE_S, hard_exit_s / 3)
        if self._next(min(drain_s, release_at_s)) is _Event.ENDED:
            return
        log.info("shutdown: parks %d turns after %.3f s", keeper.turns + self._isolation.running, self._passed_s())
        keeper.begin_shutdown()
        self._isolation.stop()
        event, within_s = self._next(release_at_s), max(hard_exit_s - self._passed_s(), 0)
        if event is None and self._others():
            event, within_s = self._await_others(process), _RELEASE_S
        if event is not _Event.ENDED:
            self._exit_at_hard_limit(process, min(within_s, _RELEASE_S))

    def finish(self, process: Process) -> None:
        """Log the end of the drain, then write to PostgreSQL the turns that only Redis has.

        Call this once the pool has ended.
        """
        self._block_after_hard_limit()
        if self.requested:
            self.begun.wait()
        turns = process.runner.turns() - self._before
        log.info(
            "shutdown, 2 of 4: drained; %d turns finished, %d parked (%.3f s)",
            turns.settled, turns.left, self._passed_s(),
        )  # fmt: skip
        began = time.monotonic()
        flushed = flush(process.runner.keeper.touched(), process.flushers, self._budget.flush_s)
        level = logging.INFO if flushed.complete else logging.WARNING
        log.log(level, "shutdown, 3 of 4: %s (%.3f s)", flushed, time.monotonic() - began)

    def release(self, process: Process) -> int:
        """Release the leases that are still held; returns their number. Call this after the flush."""
        self._block_after_hard_limit()
        return _release_leases(process)

    def end(self, released: int, began: float) -> None:
        """Log the end of the fourth phase, and make `run` return. Call this once all parts are closed.

        `released` is the number of leases that the phase released. `began` is the monotonic time of the phase's start.
        """
        self._block_after_hard_limit()
        log.info(
            "shutdown, 4 of 4: released %d leases, closed (%.3f s; %.3f s in all)",
            released, time.monotonic() - began, self._passed_s(),
        )  # fmt: skip
        self._events.put(_Event.ENDED)

    def _await_others(self, process: Process) -> _Event | None:
        """Release the leases, wait for the application's tasks, then wait for the end of the process.

        If an event arrives during either wait, returns that event at once. If no event has arrived `_RELEASE_S` seconds
        after the end of the application's tasks, perdure's own tasks hang, and this returns `None`.
        """
        log.info("shutdown: waits for %d tasks of the application, without a limit", self._others())
        _release_leases(process)
        while self._others():
            if (event := self._event(_LOOK_S)) is not None:
                return event
        return self._event(_RELEASE_S)

    def _next(self, within_s: float | None) -> _Event | None:
        """The next event; None if no event arrives within `within_s` seconds from the start of the shutdown."""
        return self._event(None if within_s is None else max(within_s - self._passed_s(), 0))

    def _event(self, timeout_s: float | None) -> _Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _passed_s(self) -> float:
        return time.monotonic() - self._began if self._began else 0.0

    def _block_after_hard_limit(self) -> None:
        """If `_exit_at_hard_limit` has begun, block the calling thread forever; otherwise return at once.

        Releasing the leases may unblock the main thread, which would then exit with status 0 instead of 1.
        """
        if self._hard:
            threading.Event().wait()

    def _exit_at_hard_limit(self, process: Process, within_s: float) -> None:
        self._hard = True
        held = process.runner.keeper.running
        exit_at = time.monotonic() + within_s
        exit_in(within_s)
        log.error("shutdown: %d sessions are still held: exits with status 1", held)
        self._isolation.stop_turns()
        closing = threading.Thread(target=_close_servers, args=(process,), name="perdure-close", daemon=True)
        closing.start()
        log.error(
            "shutdown: released %d of %d leases (%.3f s in all)", _release_leases(process), held, self._passed_s()
        )
        closing.join()
        self._isolation.end(max(exit_at - time.monotonic() - _EXIT_S, 0))
        logging.shutdown()
        os._exit(1)


def _release_leases(process: Process) -> int:
    """Release all leases, and wake another worker for each session; returns the number of leases released.

    Returns 0 if the database is unavailable; the leases then expire.
    """
    try:
        released = process.runner.keeper.release_all()
    except Unavailable as error:
        log.warning("the leases were not released; they expire: %s", loggable(error))
        return 0
    wake = process.runtime.wake
    for session_id, state in released:
        match state:
            case State.SUMMARIZING | State.ENDING:
                wake.ending(session_id)
            case State.ENDED:
                wake.consolidation(session_id)
            case _:
                wake.session(session_id, DEFAULT_PRIORITY)
    return len(released)


def _close_servers(process: Process) -> None:
    """Kill the MCP servers that are child processes, since they would outlive this process."""
    if process.runtime.connections is not None:
        process.runtime.connections.close(0)
