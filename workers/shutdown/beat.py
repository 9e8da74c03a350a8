"""The start and the shutdown of Celery beat.

On SIGTERM, SIGINT or SIGHUP, beat stops firing, closes its schedule, logs a line and exits with status 0. Beat drains
nothing: another beat, or a worker's sweeper, fires the slots that this beat misses.

Celery's own signal handler closes the schedule, even if the signal has interrupted a write to the schedule. The
handlers of this module raise `SystemExit` instead.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import time
from functools import partial
from types import FrameType
from typing import Any

from celery.signals import after_task_publish, beat_init

from perdure.assembly import open_database, require_database
from perdure.clock import SystemClock
from perdure.observe.presence import BEAT, Presence
from perdure.servers.process.stop_signals import stop_signals
from perdure.settings import Settings, ShutdownSettings
from perdure.workers.lifecycle import or_exit
from perdure.workers.shutdown.hard_limit import HardLimit

log = logging.getLogger(__name__)


class BeatShutdown:
    """The shutdown of one beat process."""

    def __init__(self, budget: ShutdownSettings, presence: Presence) -> None:
        self._limit = HardLimit(budget.hard_exit_s)
        self._fired = 0
        self._presence = presence
        self._requested_at: float | None = None

    def install(self) -> None:
        """Install the signal handlers. Call this when beat starts."""
        after_task_publish.connect(self._count, weak=False)
        for number in stop_signals():
            signal.signal(number, self._exit)
        atexit.register(self._log_end)
        log.info("beat runs until SIGTERM, SIGINT or SIGHUP")

    def _count(self, **_: Any) -> None:
        self._fired += 1

    def _exit(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested_at is not None:
            return  # a second `SystemExit` would interrupt the closing of the schedule
        self._requested_at = time.monotonic()
        self._limit.begin()
        raise SystemExit(0)

    def _log_end(self) -> None:
        self._presence.stop()
        if self._requested_at is not None:
            log.info(
                "shutdown: fires no more; fired %d slots since the start, closed (%.3f s)",
                self._fired, time.monotonic() - self._requested_at,
            )  # fmt: skip


def report(settings: Settings, database_url: str) -> Presence:
    """Report from now on that this process runs a beat."""
    database = open_database(settings, database_url)
    presence = Presence(database, SystemClock(), BEAT, f"beat-{os.getpid()}@{socket.gethostname()}")
    presence.start()
    return presence


def _start(settings: Settings, database_url: str) -> None:
    require_database(settings, database_url)
    BeatShutdown(settings.shutdown, report(settings, database_url)).install()


def follow(settings: Settings, database_url: str) -> None:
    """When beat starts in this process, check the database and install the signal handlers."""

    def begin(**_: Any) -> None:
        or_exit(partial(_start, settings, database_url))

    beat_init.connect(begin, weak=False)
