"""Threads of tools and hooks that ran past their time: nobody can end them, so they are counted.

A process that has more than `PERDURE_TURN__MAX_LEAKED_THREADS` of them is asked to leave, before it has no room
left for turns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Leaks:
    """The threads of one process that no turn waits for any more, as far as they still run."""

    def __init__(self, most: int) -> None:
        self.on_too_many: Callable[[], None] | None = None
        """Called once, in the thread of whoever leaked one too many."""
        self._most = most
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._told = False

    @property
    def count(self) -> int:
        """How many there are now."""
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            return len(self._threads)

    def add(self, thread: threading.Thread) -> None:
        """Count a thread that nobody waits for from now on."""
        with self._lock:
            self._threads = [each for each in (*self._threads, thread) if each.is_alive()]
            count = len(self._threads)
            tell = count > self._most and not self._told
            self._told = self._told or tell
        if not thread.is_alive():
            return
        log.warning("%s goes on though nobody waits for it: the process has %d such threads", thread.name, count)
        if tell and self.on_too_many is not None:
            self.on_too_many()
