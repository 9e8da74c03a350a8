"""Counts the threads of tools and hooks that run past their time limit. Python cannot stop a thread.

A worker with more than `PERDURE_TURN__MAX_LEAKED_THREADS` such threads shuts down, so that a new process replaces it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Leaks:
    """The threads of this process that still run after their time limit. `most` is the tolerated number."""

    def __init__(self, most: int) -> None:
        self.on_too_many: Callable[[], None] | None = None
        """`add` calls this function when the number of threads first exceeds `most`, and never again."""
        self._most = most
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._reported = False

    @property
    def count(self) -> int:
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            return len(self._threads)

    def add(self, thread: threading.Thread) -> None:
        """Count `thread`, which exceeded its time limit, until it ends."""
        with self._lock:
            self._threads = [each for each in (*self._threads, thread) if each.is_alive()]
            count = len(self._threads)
            exceeded = count > self._most and not self._reported
            self._reported = self._reported or exceeded
        if thread.is_alive():
            log.warning(
                "%s still runs although no turn waits for it: the process has %d such threads", thread.name, count
            )
        if exceeded and self.on_too_many is not None:
            self.on_too_many()
