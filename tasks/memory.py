"""The tasks of memory: consolidation, decay, hot memories."""

from __future__ import annotations

import logging
from typing import assert_never

from perdure.memory.consolidation.consolidate import (
    Consolidated,
    ConsolidationFailed,
    ConsolidationNotDue,
    Consolidator,
    Progress,
    Skipped,
)
from perdure.memory.consolidation.judging import resolve_judge
from perdure.memory.decay import decay as decay_all
from perdure.memory.hot_memories import refresh_hot as refresh
from perdure.models.protocol import CallAborted
from perdure.observe.current import working_on
from perdure.tasks.process import Process
from perdure.tasks.sessions import session_id_of
from perdure.tasks.task import PerdureTask, declare
from perdure.tasks.timetable import ScheduledTask

log = logging.getLogger(__name__)


@declare("memory.consolidate", base=ScheduledTask, ignore_result=False)
def consolidate(self: ScheduledTask) -> dict[str, int]:
    """Consolidate a batch of ended sessions; returns the counts of outcomes."""
    counts = consolidator(self.process).batch(_report).as_result()
    log.info("consolidated: %s", ", ".join(f"{what} {count}" for what, count in counts.items()))
    return counts


@declare("memory.consolidate_session", base=PerdureTask)
def consolidate_session(self: PerdureTask, session_id: str) -> None:
    """Consolidate one ended session.

    If this process already runs `CONSOLIDATIONS` of these tasks, the sweeper publishes the task again.
    """
    wanted = session_id_of(session_id)
    if not self.process.consolidations.acquire(blocking=False):
        return
    try:
        with working_on(session_id=wanted):
            outcome = consolidator(self.process).consolidate(wanted)
    except CallAborted:
        return  # the process shuts down, and has released the session
    finally:
        self.process.consolidations.release()
    match outcome:
        case Consolidated(merged):
            with working_on(session_id=wanted):
                log.info("session %s is consolidated: %s", wanted, merged)
        case ConsolidationFailed() | Skipped() | ConsolidationNotDue():
            return
        case _:
            assert_never(outcome)


@declare("memory.decay", base=ScheduledTask)
def decay(self: ScheduledTask) -> int:
    """Recompute each memory's decayed value; returns the number of changed memories."""
    done = decay_all(self.process.runtime.database)
    log.info("decayed: %s", done)
    return done.changed


@declare("memory.refresh_hot", base=ScheduledTask)
def refresh_hot(self: ScheduledTask) -> int:
    """Recompute the hot (most often recalled) memories of all users; returns the number of hot memories."""
    return refresh(self.process.runtime.database)


def consolidator(process: Process) -> Consolidator:
    """Make a consolidator. The keeper of `process` renews the consolidator's leases."""
    runtime = process.runtime
    settings = runtime.settings
    model = runtime.models(settings.summary_model or settings.model)
    return Consolidator(
        database=runtime.database,
        clock=runtime.clock,
        model=model,
        embedder=runtime.embedder,
        limits=settings.consolidation,
        timeout_s=settings.model_timeout_s,
        lease_s=settings.turn.lease_s,
        holding=process.runner.keeper.keep_fenced,
        timezone=settings.timezone,
        judge=resolve_judge(settings, model),
    )


def _report(progress: Progress) -> None:
    log.info("consolidating: %d of %d sessions", progress.done, progress.total)
