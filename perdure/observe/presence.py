"""Each worker and each beat reports every few seconds to PostgreSQL that it runs, with its release and its queues.

A process that is killed stops reporting; one that shuts down says so. `/readyz`, `perdure status` and the metrics read
the reports. They are in PostgreSQL rather than in Redis, so that they can be read while Redis is full or unavailable.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version

from perdure.clock import Clock
from perdure.database.engine import Database, Executor
from perdure.errors import PerdureError, loggable
from perdure.ids import new_id
from perdure.observe import queries
from perdure.resilience.duties import Duties

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between two reports."""

GONE_S = 3 * EVERY_S
"""A process that has not reported for this number of seconds counts as gone."""

WORKER, BEAT = "worker", "beat"

RELEASE = version("perdure")

TURNS_QUEUE = "turns"


@dataclass(frozen=True, slots=True)
class Running:
    """The last report of a process, `seen_s` seconds ago. `owner` names the process in its leases.

    `skew_s` tells how many seconds its clock is ahead of the database's. `quiet`: the intake is closed, and no turn
    runs in the process; `None` if it does not tell.
    """

    kind: str
    name: str
    owner: str
    release: str
    queues: Sequence[str]
    started_at: datetime
    seen_s: float
    stopped: bool
    skew_s: float
    quiet: bool | None = None

    @property
    def is_alive(self) -> bool:
        return not self.stopped and self.seen_s < GONE_S

    @property
    def runs_turns(self) -> bool:
        return self.kind == WORKER and TURNS_QUEUE in self.queues


def read_processes(executor: Executor) -> list[Running]:
    """The processes that reported within the last day."""
    return [
        Running(
            row.kind,
            row.name,
            row.owner,
            row.release,
            row.queues,
            row.started_at,
            row.seen_s,
            row.stopped,
            row.skew_s,
            row.quiet,
        )
        for row in executor.run(queries.PROCESSES, {})
    ]


@dataclass
class Presence:
    """Reports a process until `stop`. Its thread ends with the process.

    `queues` and `quiet` are called for each report: an operator may make a worker stop consuming a queue.
    """

    database: Database
    clock: Clock
    kind: str
    name: str
    queues: Callable[[], Sequence[str]] = tuple
    quiet: Callable[[], bool] = lambda: False
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._id = new_id(self.clock)
        self._duties = Duties(self.clock, EVERY_S)
        self._thread = threading.Thread(target=self._run, name="perdure-presence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self) -> None:
        """Report once.

        Raises:
            Unavailable: the database cannot be reached.
        """
        self.database.run(
            queries.REPORT,
            {
                "process_id": self._id,
                "kind": self.kind,
                "name": self.name,
                "owner": f"{socket.gethostname()}:{os.getpid()}",
                "release": RELEASE,
                "queues": list(self.queues()),
                "now": self.clock.now(),
                "quiet": self.quiet(),
            },
        )

    def stop(self) -> None:
        """End the reports, and report that the process stops. Never raises."""
        self._stopping.set()
        self._thread.join(1)
        try:
            self.database.run(queries.STOPPED, {"process_id": self._id})
        except PerdureError as error:
            log.warning("the end of this process is not reported: %s", loggable(error))

    def _run(self) -> None:
        while True:
            self._duties.run("presence", self.report)
            if self._stopping.wait(EVERY_S):
                return
