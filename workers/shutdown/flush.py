"""The flush: writes turns that only Redis has to PostgreSQL before the process ends.

For each session that the process held, under its fence: if another worker has claimed the session since, nothing is
written. The whole flush has a time limit, since it calls servers that may be unresponsive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.tasks.process import Flusher

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flushed:
    """How far a flush came: for so many `sessions` of `touched` all is written down; `written` is how much it was.

    `left` are those that others have claimed since, or that have a turn to run first: they flush them.
    """

    touched: int
    sessions: int = 0
    written: int = 0
    left: int = 0

    @property
    def whole(self) -> bool:
        """Whether every session was seen to."""
        return self.sessions + self.left == self.touched

    def __str__(self) -> str:
        left = f", {self.left} left to others" if self.left else ""
        return f"flushed {self.sessions} of {self.touched} sessions, {self.written} entries{left}"


def flushers(runtime: Runtime) -> tuple[Flusher, ...]:
    """What a process with these parts has to flush."""
    return () if runtime.redis_memory is None else (partial(runtime.redis_memory.flush, runtime.database),)


def flush(touched: Sequence[tuple[UUID, Fence]], flushers: Sequence[Flusher], within_s: float) -> Flushed:
    """Flush the sessions in their order, for at most `within_s` seconds."""
    flushed = Flushed(len(touched))
    until = time.monotonic() + within_s
    # A flusher that hangs is left behind: it writes under a fence, so that a late write does no harm.
    thread = threading.Thread(
        target=_flush, args=(touched, flushers, flushed, until), name="perdure-flush", daemon=True
    )
    thread.start()
    thread.join(within_s)
    return flushed


def _flush(touched: Sequence[tuple[UUID, Fence]], flushers: Sequence[Flusher], flushed: Flushed, until: float) -> None:
    for session_id, fence in touched:
        if time.monotonic() >= until:
            return
        whole, left = True, False
        for flusher in flushers:
            try:
                written = flusher(session_id, fence)
            except Unavailable as error:
                log.warning("sessions could not be flushed: %s", error.message)
                return
            except Exception:
                log.exception("session %s could not be flushed", session_id)
                whole = False
            else:
                flushed.written += written or 0
                left |= written is None
        flushed.sessions += whole and not left
        flushed.left += whole and left
