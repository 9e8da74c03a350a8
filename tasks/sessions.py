"""`sessions.end` ends one session; `sessions.expire_idle` requests the end of idle sessions, each minute."""

from __future__ import annotations

import logging
from functools import partial
from typing import assert_never
from uuid import UUID

from perdure.database.fencing import Fence
from perdure.errors import InvalidRequest
from perdure.observe.current import working_on
from perdure.runtime import Runtime
from perdure.sessions.ending import Ended, Ender, EndNotDue, EndPostponed, Released, expire_idle, request_end
from perdure.snapshots.deletion import delete_snapshots
from perdure.tasks.process import Process
from perdure.tasks.task import PerdureTask, declare
from perdure.tasks.timetable import ScheduledTask
from perdure.turns.inbox.incoming import parse_reason
from perdure.turns.sweep import postpone

log = logging.getLogger(__name__)


@declare("sessions.end", base=PerdureTask, hint=False)
def end(self: PerdureTask, session_id: str, reason: str | None = None) -> None:
    """End a session whose turns are all settled. If `reason` is given, request the end first.

    A session with unsettled turns ends after its last turn is settled. If this process is already
    ending `ENDINGS` sessions, the sweeper wakes the session again later.
    """
    wanted = session_id_of(session_id)
    with working_on(session_id=wanted):
        _end(self, wanted, reason)


def _end(self: PerdureTask, wanted: UUID, reason: str | None) -> None:
    if reason is not None:
        requested = request_end(self.process.runtime.database, wanted, parse_reason(reason))
        if not requested.may_end:
            requested.wake(self.process.runtime.wake)
            return
    if not self.process.endings.acquire(blocking=False):
        postpone(self.process.runtime, wanted)
        return
    try:
        outcome = ender(self.process).end(wanted)
    finally:
        self.process.endings.release()
    match outcome:
        case Ended():
            log.info("session %s has ended", wanted)
            self.process.runtime.wake.consolidation(wanted)
        case Released():
            self.process.runtime.wake.ending(wanted)
        case EndPostponed() | EndNotDue():
            return
        case _:
            assert_never(outcome)


@declare("sessions.expire_idle", base=ScheduledTask)
def expire(self: ScheduledTask) -> int:
    """Request the end of all idle sessions; returns their number."""
    runtime = self.process.runtime
    found = expire_idle(runtime.database, runtime.settings.session.idle_timeout_s)
    for session_id in found:
        runtime.wake.ending(session_id)
    return len(found)


def ender(process: Process) -> Ender:
    """Make an ender of sessions. The keeper of `process` renews the ender's leases."""
    runtime = process.runtime
    settings = runtime.settings
    return Ender(
        database=runtime.database,
        clock=runtime.clock,
        model=runtime.models(settings.summary_model or settings.model),
        timeout_s=settings.model_timeout_s,
        lease_s=settings.turn.lease_s,
        holding=process.runner.keeper.keep_fenced,
        clean=partial(_clean, runtime),
    )


def _clean(runtime: Runtime, session_id: UUID, fence: Fence) -> None:
    """Move an ending session's memory from Redis to PostgreSQL, then delete the session's snapshots.

    Raises:
        Unavailable: a store cannot be reached; the sweeper tries again to end the session.
    """
    if runtime.redis_memory is None or runtime.redis_memory.end_session(runtime.database, session_id, fence):
        delete_snapshots(runtime.database, runtime.snapshots, session_id)


def session_id_of(text: str) -> UUID:
    """The id of a session that is an argument of a task.

    Raises:
        InvalidRequest: it is no UUID.
    """
    try:
        return UUID(text)
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest("session_id: must be a UUID.") from None
