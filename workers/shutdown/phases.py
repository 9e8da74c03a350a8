"""A worker's way out, in four phases with a budget each, told in the log one by one.

    1  no more work is taken; what was prefetched is handed back     (see `taking`)
    2  drain: what runs goes on; at the deadline a turn that waits for a model is parked and
       released, and a successor woken; a tool is awaited
    3  flush: sessions that were worked on here are written down     (see `flushing`)
    4  leases that are still held are given back, connections closed; exit 0

One thread holds the clock. It waits for whatever comes first: the end, another signal, or the
time. A second signal makes the drain's deadline now, and leaves the hard limit where it is;
a third makes the hard limit now. Shortly before the hard limit leases are given back and
successors woken, so that at the limit the process has left by `os._exit` with status 1,
whatever its threads do.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from enum import Enum, auto

from perdure.errors import Unavailable
from perdure.sessions.states import State
from perdure.settings import ShutdownSettings
from perdure.tasks.process import Process
from perdure.turns.inbox.incoming import DEFAULT_PRIORITY
from perdure.turns.run.runner import Turns
from perdure.workers.consumer.pause import Taking
from perdure.workers.isolated.run import Isolation
from perdure.workers.shutdown.flush import flush
from perdure.workers.shutdown.hard_limit import exit_in

log = logging.getLogger(__name__)

_GIVE_BACK_S = 3.0
"""For giving leases back, out of the hard limit's time: of a short one no more than a third."""

_LEAVE_S = 0.5
"""Of that, for leaving once isolated processes have had their time."""


class _Event(Enum):
    ASKED = auto()
    ENDED = auto()


class Shutdown:
    """The end of one worker process."""

    def __init__(self, budget: ShutdownSettings, isolation: Isolation, taking: Taking) -> None:
        self.asked = False
        self.begun = threading.Event()
        self._hard = False
        self._budget = budget
        self._isolation = isolation
        self._taking = taking
        # Its `put` may be called in a signal handler, even in one that interrupts another.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._began = 0.0
        self._before = Turns()

    def ask(self) -> None:
        """Begin, or hasten. Safe in a signal handler."""
        self.asked = True
        self._events.put(_Event.ASKED)

    def watch(self, process: Process) -> None:
        """See the process out. Returns when it has ended in time; else does not return."""
        self._next(None)
        self._began = time.monotonic()
        self._before = process.runner.turns()
        self.begun.set()
        self._taking.notice()
        keeper = process.runner.keeper
        running = keeper.turns + self._isolation.running
        give_back_at_s = self._budget.hard_exit_s - min(_GIVE_BACK_S, self._budget.hard_exit_s / 3)
        log.info("shutdown: %d turns run; %g s to drain, %g s at most", running, *self._limits())
        if self._next(min(self._budget.drain_s, give_back_at_s)) is _Event.ENDED:
            return
        log.info("shutdown: parks %d turns after %.3f s", keeper.turns + self._isolation.running, self._passed_s())
        keeper.drain()
        self._isolation.leave()
        if self._next(give_back_at_s) is _Event.ENDED:
            return
        self._leave_hard(process)

    def finish(self, process: Process) -> None:
        """The pool has ended: flush."""
        self._stay_behind()
        if self.asked:
            self.begun.wait()
        turns = process.runner.turns() - self._before
        log.info(
            "shutdown, 2 of 4: drained; %d turns finished, %d parked (%.3f s)",
            turns.settled, turns.parked, self._passed_s(),
        )  # fmt: skip
        began = time.monotonic()
        flushed = flush(process.runner.keeper.touched(), process.flushers, self._budget.flush_s)
        level = logging.INFO if flushed.whole else logging.WARNING
        log.log(level, "shutdown, 3 of 4: %s (%.3f s)", flushed, time.monotonic() - began)

    def release(self, process: Process) -> int:
        """Give back what is still held, though nothing runs any more; how many leases that were."""
        self._stay_behind()
        return _give_back(process)

    def ended(self, released: int, began: float) -> None:
        """All is closed, which `began` (monotonic) with so many leases given back."""
        self._stay_behind()
        log.info(
            "shutdown, 4 of 4: released %d leases, closed (%.3f s; %.3f s in all)",
            released, time.monotonic() - began, self._passed_s(),
        )  # fmt: skip
        self._events.put(_Event.ENDED)

    def _next(self, within_s: float | None) -> _Event | None:
        """The next event; None if there is none until so many seconds after the beginning."""
        try:
            return self._events.get(timeout=None if within_s is None else max(within_s - self._passed_s(), 0))
        except queue.Empty:
            return None

    def _passed_s(self) -> float:
        return time.monotonic() - self._began if self._began else 0.0

    def _limits(self) -> tuple[float, float]:
        return self._budget.drain_s, self._budget.hard_exit_s

    def _stay_behind(self) -> None:
        """Past the hard limit the status is 1, even if giving the leases back has set free what held the process up."""
        if self._hard:
            threading.Event().wait()

    def _leave_hard(self, process: Process) -> None:
        self._hard = True
        held = process.runner.keeper.running
        exit_in(min(_GIVE_BACK_S, max(self._budget.hard_exit_s - self._passed_s(), 0)))
        log.error("shutdown: %d sessions are still held: leaves the hard way", held)
        self._isolation.park()
        closing = threading.Thread(target=_close_servers, args=(process,), name="perdure-close", daemon=True)
        closing.start()
        log.error("shutdown: gave back %d of %d leases (%.3f s in all)", _give_back(process), held, self._passed_s())
        closing.join()
        self._isolation.end(max(self._budget.hard_exit_s - self._passed_s() - _LEAVE_S, 0))
        logging.shutdown()
        os._exit(1)


def _give_back(process: Process) -> int:
    try:
        released = process.runner.keeper.release_all()
    except Unavailable as error:
        log.warning("leases were not given back, and run out: %s", error.message)
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
    """MCP servers that are processes are killed, lest they outlive this one."""
    if process.runtime.connections is not None:
        process.runtime.connections.close(0)
