"""Counts the tasks that this process ran, by name and outcome, and sums their durations."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass


@dataclass(slots=True)
class _Tally:
    succeeded: int = 0
    failed: int = 0
    seconds: float = 0.0


class TaskMetrics:
    """Counts task runs by task name. Threads may share an instance.

    `celery -A perdure inspect perdure` shows the counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)

    def count(self, task: str, seconds: float, *, failed: bool) -> None:
        with self._lock:
            tally = self._tallies[task]
            tally.seconds += seconds
            if failed:
                tally.failed += 1
            else:
                tally.succeeded += 1

    def snapshot(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {
                name: {"succeeded": tally.succeeded, "failed": tally.failed, "seconds": round(tally.seconds, 3)}
                for name, tally in sorted(self._tallies.items())
            }
