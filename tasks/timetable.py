"""Tasks that do the work of schedule slots. Beat or a sweeper fires them.

A firing is a message with the name of a schedule entry in a header. The task claims the entry's newest slot, runs its
function and marks the slot done. If the newest slot is not due, the task does nothing. A message without the header is
a manual call: the task runs its function and claims no slot.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, assert_never

from perdure.tasks.deliveries import Publisher
from perdure.tasks.task import PerdureTask
from perdure.timetable.entry import HEADER, ScheduleEntry, options
from perdure.timetable.ledger import Done, SlotNotDue, run_slot

log = logging.getLogger(__name__)


def fire(publisher: Publisher, entry: ScheduleEntry) -> bool:
    """Publish the message that fires `entry`, within about a second; returns whether the broker accepted it."""
    return publisher.publish(entry.task, dict(entry.arguments), **options(entry))


class ScheduledTask(PerdureTask):
    """A task that schedule entries may fire."""

    abstract = True

    @property
    def is_firing(self) -> bool:
        return self._entry_name is not None

    def perform(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task's function. If a schedule entry fired the task, call the function only if a slot is due."""
        name = self._entry_name
        work = partial(super().perform, *args, **kwargs)
        return work() if name is None else self._run_slot(name, work)

    @property
    def _entry_name(self) -> str | None:
        name: str | None = (self.request.headers or {}).get(HEADER)
        return name

    def _run_slot(self, name: str, work: partial[Any]) -> Any:
        entry = self.process.entries.get(name)
        if entry is None or entry.task != self.name:
            log.warning(
                "fired for the schedule entry %r, which this release does not have for this task: nothing was run", name
            )
            return None
        runtime = self.process.runtime
        outcome = run_slot(runtime.database, runtime.clock, runtime.settings.turn, entry, work)
        match outcome:
            case Done(slot, result):
                log.debug("schedule entry %s, slot %s: done", name, slot)
                return result
            case SlotNotDue():
                return None
            case _:
                assert_never(outcome)
