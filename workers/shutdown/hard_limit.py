"""The hard limit of a shutdown: the time after which the process exits with status 1, even if threads hang.

A separate thread calls `os._exit`, so a thread that never returns, a blocked event loop or a full log pipe cannot
prevent the exit.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

log = logging.getLogger(__name__)

_STATUS = 1
_LOG_S = 0.5


def exit_in(seconds: float) -> None:
    """Make this process exit with status 1 after `seconds`. Returns at once."""
    timer = threading.Timer(seconds, _exit)
    timer.daemon = True
    timer.start()


class HardLimit:
    """Exits the process `seconds` after `begin` is called."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="perdure-limit", daemon=True).start()

    def begin(self) -> None:
        """Start the time limit. Safe in a signal handler."""
        self._begun.put(None)

    def _watch(self) -> None:
        self._begun.get()
        exit_in(self._seconds)


def _exit() -> None:
    logging_thread = threading.Thread(target=log.error, args=("shutdown: the hard limit is reached",), daemon=True)
    logging_thread.start()
    logging_thread.join(_LOG_S)
    os._exit(_STATUS)
