"""Converts the schedule's entries to a schedule for Celery beat.

Beat only publishes messages and stores no state. The ledger in PostgreSQL (`perdure.timetable.ledger`) ignores repeated
firings, and the workers' sweepers fire slots that beat missed. So any number of beats may run, and beat needs no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from celery.beat import Scheduler
from celery.schedules import BaseSchedule, schedstate

from perdure.clock import Clock, SystemClock
from perdure.observe.alive import alive_file, touch
from perdure.schedules.entries import active_entries
from perdure.settings import Settings
from perdure.tasks.timetable import ScheduledTask
from perdure.timetable.cadence import Cadence
from perdure.timetable.entry import ScheduleEntry, options


class MemoryScheduler(Scheduler):  # type: ignore[misc]  # celery carries no types
    """Celery's scheduler that keeps its state in memory; its default scheduler writes a file. Touches `alive`."""

    def __init__(self, *given: Any, alive: Path, **options: Any) -> None:
        self._alive = alive
        super().__init__(*given, **options)

    def tick(self, *given: Any, **options: Any) -> float:
        """Publish what is due; returns the seconds until the next check. An entry of each minute keeps them short."""
        touch(self._alive)
        pause_s: float = super().tick(*given, **options)
        return pause_s


class SlotSchedule(BaseSchedule):  # type: ignore[misc]  # celery carries no types
    """A cadence as a Celery schedule. It is due if a slot lies between the last run and now."""

    def __init__(self, cadence: Cadence, clock: Clock) -> None:
        super().__init__(nowfun=clock.now)
        self.cadence = cadence

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        """The time until the first slot after `last_run_at`. It is negative if the slot has passed."""
        remaining: timedelta = self.cadence.next(last_run_at.astimezone(UTC)) - self.now()
        return remaining

    def is_due(self, last_run_at: datetime) -> schedstate:
        """Whether to fire now, and the seconds until the next check."""
        now = self.now()
        due = self.cadence.previous(now) > last_run_at
        return schedstate(due, (self.cadence.next(now) - now).total_seconds())

    def __repr__(self) -> str:
        return f"<{self.cadence.describe()}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlotSchedule) and other.cadence == self.cadence

    def __hash__(self) -> int:
        return hash(self.cadence)


def beat_schedule(entries: Mapping[str, ScheduleEntry], clock: Clock) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "task": entry.task,
            "schedule": SlotSchedule(entry.cadence, clock),
            "kwargs": dict(entry.arguments),
            "options": options(entry),
        }
        for name, entry in entries.items()
    }


def configure_beat(app: Celery, settings: Settings, clock: Clock | None = None) -> dict[str, ScheduleEntry]:
    """Load the application's tasks, and configure its beat with the entries of these tasks; returns the entries.

    Raises:
        TypeError: the task of an entry is not a `ScheduledTask`.
    """
    app.loader.import_default_modules()
    found = active_entries(app.tasks, settings)
    for entry in found.values():
        if not isinstance(app.tasks[entry.task], ScheduledTask):
            raise TypeError(f"{entry.task} is not a ScheduledTask: it would not settle the slots of {entry.name!r}")
    scheduler = partial(MemoryScheduler, alive=alive_file(settings.data_dir, "beat"))
    app.conf.update(beat_scheduler=scheduler, beat_schedule=beat_schedule(found, clock or SystemClock()))
    return found
