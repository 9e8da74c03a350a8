"""The drain of all workers: while the intake is closed, workers keep running, but run no turns and hold no sessions.

The intake is a row in PostgreSQL, which `perdure drain` closes and opens. When the intake is closed, the worker pauses
the queues that start turns. Running turns may continue for `PERDURE_SHUTDOWN__DRAIN_S` seconds. After this time, the
worker parks the remaining turns. When no turn runs, the worker flushes, and waits until the intake opens. While the
intake is closed, the worker still ends sessions, delivers replies and runs scheduled tasks.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from perdure.settings import Settings
from perdure.tasks.process import Process
from perdure.turns import drain
from perdure.turns.drain import DrainPhase
from perdure.workers.consumer.pause import Consumption
from perdure.workers.isolated.child import Isolation
from perdure.workers.shutdown.flush import WorkerFlushed, flush

log = logging.getLogger(__name__)

_LOOK_S = 0.5


class FleetDrain:
    """Pauses a worker while the intake is closed. Any thread may use `report` and `is_quiet`; only one the rest."""

    def __init__(self, process: Process, settings: Settings, isolation: Isolation, consumption: Consumption) -> None:
        self._process = process
        self._settings = settings
        self._isolation = isolation
        self._consumption = consumption
        self._phase = DrainPhase.OPEN
        self._park_at = 0.0
        self._parked = 0
        self._flushed = WorkerFlushed(0)

    @property
    def pause_s(self) -> float:
        """Seconds until `follow_intake` should be called again."""
        sweep_s = self._settings.turn.sweep_s
        return min(sweep_s, _LOOK_S) if self._phase is DrainPhase.DRAINING else sweep_s

    @property
    def is_open(self) -> bool:
        """Whether the intake was open at the last successful `follow_intake`."""
        return self._phase is DrainPhase.OPEN

    @property
    def is_quiet(self) -> bool:
        """Whether the intake was closed at the last successful `follow_intake`, and no turn ran in this process."""
        return self._phase is DrainPhase.QUIET

    def report(self) -> dict[str, Any]:
        """The drain phase, and the numbers of parked turns, flushed sessions and flushed turns in the latest drain."""
        return {
            "intake": self._phase.value,
            "parked": self._parked,
            "flushed_sessions": self._flushed.sessions,
            "flushed_entries": self._flushed.written,
        }

    def follow_intake(self) -> None:
        """Pause the worker if the intake is closed, else resume the worker. `is_open` then has the result.

        Raises:
            Unavailable: the database cannot be reached; the phase does not change.
        """
        if not drain.is_active(self._process.runtime.database):
            self._reopen()
            return
        if self._phase is DrainPhase.OPEN:
            self._close()
        if self._phase is DrainPhase.DRAINING or self._running():
            self._drain()

    def _close(self) -> None:
        self._consumption.pause()
        self._phase = DrainPhase.DRAINING
        drain_s = self._settings.shutdown.drain_s
        self._park_at = time.monotonic() + drain_s
        self._parked, self._flushed = 0, WorkerFlushed(0)
        log.info("the intake is closed: %d turns run here; %g s to finish", self._running(), drain_s)

    def _drain(self) -> None:
        self._phase = DrainPhase.DRAINING
        keeper = self._process.runner.keeper
        if self._running() and time.monotonic() >= self._park_at:
            parked = keeper.stop_turns() + self._isolation.stop_turns()
            self._parked += parked
            log.info("the intake is closed: parks %d turns", parked)
            self._park_at = time.monotonic() + self._settings.shutdown.hard_exit_s
        if self._running():
            return
        self._flushed = flush(keeper.touched(), self._process.flushers, self._settings.shutdown.flush_s)
        self._phase = DrainPhase.QUIET
        log.info("the intake is closed: nothing runs here; %s", self._flushed)

    def _reopen(self) -> None:
        if self._phase is DrainPhase.OPEN:
            return
        self._consumption.resume()
        self._phase = DrainPhase.OPEN
        log.info("the intake is open again")

    def _running(self) -> int:
        return self._process.runner.keeper.turns + self._isolation.running
