"""The hard limit of a shutdown: the process exits with status 1, whatever hangs.

`os._exit` on a thread of its own: neither a thread that never returns, nor a blocked event loop, nor a log pipe without
a reader prevents it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

log = logging.getLogger(__name__)

_STATUS = 1
_SAY_S = 0.5


def exit_in(seconds: float) -> None:
    """This process leaves in so many seconds, unless it has ended by then."""
    timer = threading.Timer(seconds, _leave)
    timer.daemon = True
    timer.start()


class HardLimit:
    """Lets a process live for `seconds` after it was told to leave. `begin` may be called in a signal handler."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="perdure-limit", daemon=True).start()

    def begin(self) -> None:
        """It was told to leave."""
        self._begun.put(None)

    def _watch(self) -> None:
        self._begun.get()
        exit_in(self._seconds)


def _leave() -> None:
    saying = threading.Thread(target=log.error, args=("shutdown: the hard limit is reached",), daemon=True)
    saying.start()
    saying.join(_SAY_S)
    os._exit(_STATUS)
