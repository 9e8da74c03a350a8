"""The flush: writes to PostgreSQL the turns that only Redis has, before the process ends.

The flush writes a session's turns under the fence of the process's last claim. If another worker has claimed the
session since then, the flush writes nothing. The flush has a time limit, since Redis or PostgreSQL may be unresponsive.
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
from perdure.errors import Unavailable, loggable
from perdure.runtime import Runtime
from perdure.tasks.process import Flusher

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerFlushed:
    """The result of a flush.

    Attributes:
        touched: The number of sessions to flush.
        sessions: The number of flushed sessions.
        written: The number of turns written to PostgreSQL.
        left: The number of sessions that another worker flushes later, because that worker has claimed the session or
            because a turn of the session must run first.
    """

    touched: int
    sessions: int = 0
    written: int = 0
    left: int = 0

    @property
    def complete(self) -> bool:
        """Whether each session was flushed or left to another worker."""
        return self.sessions + self.left == self.touched

    def __str__(self) -> str:
        left = f", {self.left} left to others" if self.left else ""
        return f"flushed {self.sessions} of {self.touched} sessions, {self.written} turns{left}"


def flushers(runtime: Runtime) -> tuple[Flusher, ...]:
    return () if runtime.redis_memory is None else (partial(runtime.redis_memory.flush, runtime.database),)


def flush(touched: Sequence[tuple[UUID, Fence]], flushers: Sequence[Flusher], within_s: float) -> WorkerFlushed:
    """Flush the sessions in the given order. After `within_s` seconds, return the result so far."""
    flushed = WorkerFlushed(len(touched))
    until = time.monotonic() + within_s
    # A flusher that hangs is abandoned. It writes under a fence, so a late write is harmless.
    thread = threading.Thread(
        target=_flush, args=(touched, flushers, flushed, until), name="perdure-flush", daemon=True
    )
    thread.start()
    thread.join(within_s)
    return flushed


def _flush(
    touched: Sequence[tuple[UUID, Fence]], flushers: Sequence[Flusher], flushed: WorkerFlushed, until: float
) -> None:
    for session_id, fence in touched:
        if time.monotonic() >= until:
            return
        succeeded, left = True, False
        for flusher in flushers:
            try:
                written = flusher(session_id, fence)
            except Unavailable as error:
                log.warning("the flush ended early: %s", loggable(error))
                return
            except Exception:
                log.exception("session %s could not be flushed", session_id)
                succeeded = False
            else:
                flushed.written += written or 0
                left |= written is None
        flushed.sessions += succeeded and not left
        flushed.left += succeeded and left
