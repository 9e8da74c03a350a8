"""Simulates a fleet in one thread: Celery beats, a queue that loses and repeats messages, a sweeper and a worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from random import Random
from typing import Any

from celery import Celery
from celery.beat import Scheduler

from perdure.clock import MovedClock
from perdure.database.engine import Statement
from perdure.runtime import Runtime
from perdure.schedules.beat import configure_beat
from perdure.tasks.process import Process
from perdure.tasks.timetable import ScheduledTask
from perdure.timetable.entry import ScheduleEntry, options
from perdure.timetable.reading import read_schedules
from perdure.timetable.sweep import sweep_slots
from perdure.turns.run.loop import Runner

TASKS = (
    "sessions.expire_idle",
    "memory.consolidate",
    "memory.decay",
    "memory.refresh_hot",
    "casebank.prune",
    "casebank.reflect",
    "casebank.advance",
    "casebank.count",
    "casebank.suggest",
    "maintenance.retain",
)

Message = tuple[str, dict[str, Any], dict[str, Any]]
"""A task's name, its keyword arguments, and the options of `apply_async`."""

_SETTLED = Statement(
    "tests.settled",
    "SELECT entry, slot FROM schedule_slots WHERE done_at IS NOT NULL ORDER BY entry, slot",
    writes=False,
)


def make_app(
    runtime: Runtime, broker_url: str, names: tuple[str, ...], runs: list[tuple[str, dict[str, Any]]]
) -> Celery:
    """A Celery application with the tasks `names`. Each run appends the task's name and arguments to `runs`."""
    app = Celery("tests", broker=broker_url, set_as_current=False)
    app.conf.update(timezone=runtime.settings.timezone, task_ignore_result=True, worker_hijack_root_logger=False)

    def add(name: str) -> None:
        def body(self: ScheduledTask, **arguments: Any) -> str:
            runs.append((self.name, arguments))
            return name

        app.task(body, name=name, bind=True, base=ScheduledTask, shared=False)

    app.finalize()  # registers the real tasks, if another test of this process has imported them
    for name in TASKS:
        app.tasks.pop(name, None)
    for name in names:
        add(name)
    found = configure_beat(app, runtime.settings, runtime.clock)
    process = Process(runtime, Runner(runtime, "tests"), {}, lambda _: None, found)
    app.perdure = lambda: process
    return app


class Fleet:
    """Beats, a sweeper and a worker, all with the test's clock. `wire` is the queue of their messages."""

    def __init__(self, runtime: Runtime, clock: MovedClock, names: tuple[str, ...], *, beats: int, seed: int) -> None:
        self.clock = clock
        self.runtime = runtime
        self.runs: list[tuple[str, dict[str, Any]]] = []
        self.wire: list[Message] = []
        self.app = make_app(runtime, "memory://", names, self.runs)
        self.entries: dict[str, ScheduleEntry] = dict(self.app.perdure().entries)
        self.beats = [self.beat() for _ in range(beats)]
        self.lost = self.fired = 0
        self._random = Random(seed)  # noqa: S311 (a failed run must be repeatable)

    def beat(self) -> Scheduler:
        """Start a beat."""
        wire = self.wire

        class Beat(Scheduler):  # type: ignore[misc]  # celery carries no types
            def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **_: Any) -> None:
                wire.append((entry.task, entry.kwargs, entry.options))

        return Beat(app=self.app, schedule={})

    def tick(self) -> None:
        """Let each beat fire its due entries."""
        for beat in self.beats:
            while beat.tick() <= 0:
                pass

    def sweep(self) -> None:
        """Execute a round of the sweeper, if a round is due."""

        def fire(entry: ScheduleEntry) -> bool:
            self.wire.append((entry.task, dict(entry.arguments), options(entry)))
            return True

        sweep_slots(self.runtime.database, self.runtime.settings.turn, self.entries.values(), fire)

    def deliver(self, *, flush: float, repeat: float) -> None:
        """Lose all tasks with probability `flush`. Else run each task, and requeue it with probability `repeat`."""
        flushed = self._random.random() < flush
        messages = [] if flushed else list(self.wire)
        self.fired += len(self.wire)
        self.lost += len(self.wire) - len(messages)
        self.wire[:] = [each for each in messages if self._random.random() < repeat]
        for name, arguments, published in messages:
            self.app.tasks[name].apply(kwargs=arguments, headers=published["headers"], throw=True)

    def waiting(self) -> bool:
        """Whether any due slot is not done."""
        now = self.clock.now()
        return any(each.next_due <= now for each in read_schedules(self.runtime.database, self.entries.values()))

    def next_slot(self) -> datetime:
        """The time of the earliest future slot of any entry."""
        now = self.clock.now()
        return min(entry.cadence.next(now) for entry in self.entries.values())

    def slots(self, begin: datetime, end: datetime) -> dict[str, list[datetime]]:
        """The slots after `begin` and up to `end`, by task."""
        return {entry.task: list(_between(entry, begin, end)) for entry in self.entries.values()}

    def settled(self) -> dict[str, list[datetime]]:
        """The slots that the ledger shows as done, by task."""
        rows = self.runtime.database.run(_SETTLED, {})
        found: defaultdict[str, list[datetime]] = defaultdict(list)
        for row in rows:
            found[self.entries[row.entry].task].append(row.slot)
        return dict(found)

    def restart_a_beat(self) -> None:
        """Restart a random beat. The restarted beat has lost its state."""
        self.beats.pop(self._random.randrange(len(self.beats))).close()
        self.beats.append(self.beat())


def _between(entry: ScheduleEntry, begin: datetime, end: datetime) -> Iterator[datetime]:
    slot = entry.cadence.next(begin)
    while slot <= end:
        yield slot
        slot = entry.cadence.next(slot)


def weeks(number: float) -> timedelta:
    """A timedelta of weeks."""
    return timedelta(weeks=number)
