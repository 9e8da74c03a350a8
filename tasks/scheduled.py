"""Tasks that do the work of a schedule's slots: fired by beat or a sweeper, settled by the work.

A firing is a message with the entry's name in a header. The task takes the entry's newest
slot, runs its function and marks the slot done; a firing that finds no slot waiting does
nothing. The same task called by hand, without that header, just runs: no slot is meant.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, assert_never

from perdure.schedule.entry import Entry
from perdure.schedule.ledger import Done, NotDue, run_slot
from perdure.tasks.deliveries import Publisher
from perdure.tasks.task import PerdureTask

log = logging.getLogger(__name__)

HEADER = "perdure_entry"


def options(entry: Entry) -> dict[str, Any]:
    """How a firing of `entry` is published, in the words of Celery's `apply_async`."""
    return {"queue": entry.queue, "headers": {HEADER: entry.name}}


def fire(publisher: Publisher, entry: Entry) -> bool:
    """Publish a firing within about a second; whether the broker took it."""
    return publisher.publish(entry.task, dict(entry.arguments), **options(entry))


class ScheduledTask(PerdureTask):
    """A task that an entry of the schedule may name."""

    abstract = True

    @property
    def is_firing(self) -> bool:
        """Whether the message at hand is a slot's, and not a call by hand."""
        return self._fired_for is not None

    def perform(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task's function: for the slot that is due, or at once if no slot is meant."""
        name = self._fired_for
        work = partial(super().perform, *args, **kwargs)
        return work() if name is None else self._for_slot(name, work)

    @property
    def _fired_for(self) -> str | None:
        name: str | None = (self.request.headers or {}).get(HEADER)
        return name

    def _for_slot(self, name: str, work: partial[Any]) -> Any:
        entry = self.process.entries.get(name)
        if entry is None or entry.task != self.name:
            log.warning("fired for the entry %r, which is none of this task's in this release: nothing was run", name)
            return None
        runtime = self.process.runtime
        outcome = run_slot(runtime.database, runtime.clock, runtime.settings.turn, entry, work)
        match outcome:
            case Done(slot, result):
                log.info("%s of %s is done", name, slot)
                return result
            case NotDue():
                return None
            case _:
                assert_never(outcome)
