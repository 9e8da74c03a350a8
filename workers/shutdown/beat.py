"""Beat's way out: it fires nothing more, writes its schedule down, says so, and exits with 0.

Nothing is drained, for it only gives slots out: what it leaves, another beat or the workers' sweepers
find in the ledger. Celery's own handler would write the schedule within the signal handler, in the middle
of whatever was being written there.
"""

from __future__ import annotations

import atexit
import logging
import signal
import time
from functools import partial
from types import FrameType
from typing import Any

from celery.signals import after_task_publish, beat_init

from perdure.settings import ShutdownSettings
from perdure.workers.assembly import require_database
from perdure.workers.lifecycle import or_exit
from perdure.workers.shutdown.hard_limit import HardLimit

log = logging.getLogger(__name__)


class Beating:
    """One beat process, from its first signal on."""

    def __init__(self, budget: ShutdownSettings) -> None:
        self._limit = HardLimit(budget.hard_exit_s)
        self._fired = 0
        self._told_at: float | None = None

    def begin(self) -> None:
        """It beats: signals are ours from here on."""
        after_task_publish.connect(self._count, weak=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        atexit.register(self._ended)
        log.info("beats until SIGTERM or SIGINT")

    def _count(self, **_: Any) -> None:
        self._fired += 1

    def _leave(self, _number: int, _frame: FrameType | None) -> None:
        if self._told_at is not None:
            return  # it ends already, and is not to be disturbed in writing
        self._told_at = time.monotonic()
        self._limit.begin()
        raise SystemExit(0)

    def _ended(self) -> None:
        if self._told_at is not None:
            log.info(
                "shutdown: fires nothing more, %d slots in this life; closed (%.3f s)",
                self._fired, time.monotonic() - self._told_at,
            )  # fmt: skip


def follow(budget: ShutdownSettings, database_url: str) -> None:
    """If the process is a beat: check the database at its start, and see it out."""

    def begin(**_: Any) -> None:
        or_exit(partial(require_database, database_url))
        Beating(budget).begin()

    beat_init.connect(begin, weak=False)
