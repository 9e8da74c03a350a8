"""Beats and sweepers fire slots. Each slot runs once, at its local time, even if the queue is sometimes flushed."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.models.resolve import Models
from perdure.runtime import Runtime
from perdure.schedules.beat import MemoryScheduler, SlotSchedule, beat_schedule, configure_beat
from perdure.schedules.entries import active_entries
from perdure.settings import Settings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.timetable import ledger
from perdure.timetable.cadence import AtTimes, Every
from tests.conftest import RecordingWaker
from tests.schedules.conftest import hours, move_to, seconds
from tests.schedules.fleet import TASKS, Fleet, weeks

BERLIN = "Europe/Berlin"
NEW_YORK = "America/New_York"
MINUTELY = {"sessions.expire_idle", "casebank.advance", "casebank.count", "casebank.suggest"}
IN_A_YEAR = tuple(name for name in TASKS if name not in MINUTELY)


@pytest.fixture
def runtime_in(settings: Settings, clock: MovedClock, database: Database, agents: Any, waker: RecordingWaker) -> Any:
    """A function: `runtime_in(zone)` makes a runtime whose schedule uses the time zone `zone`."""

    def make(zone: str) -> Runtime:
        local = settings.model_copy(update={"timezone": zone})
        return Runtime(local, clock, database, agents, Models(local, clock).get, waker, PostgresSnapshots(database))

    return make


@pytest.fixture
def all_slots_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ledger keep all slots, so that a test can read them at the end."""
    monkeypatch.setattr(ledger, "KEPT_DAYS", 365)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("zone", "begin", "changing", "sundays"),
    [
        # Clocks go forward from two to three on 28 March. That Sunday's slot is the first instant after the gap.
        (BERLIN, datetime(2027, 2, 24, 9, tzinfo=UTC), datetime(2027, 3, 28, 1, tzinfo=UTC), {time(2): 9, time(3): 1}),
        # Clocks go back from three to two on 31 October. Two o'clock occurs twice; the slot is its first occurrence.
        (BERLIN, datetime(2027, 10, 28, 9, tzinfo=UTC), datetime(2027, 10, 31, 0, tzinfo=UTC), {time(2): 1}),
        # Clocks go back from two to one on 7 November. Two o'clock occurs once.
        (NEW_YORK, datetime(2027, 11, 1, 15, tzinfo=UTC), datetime(2027, 11, 7, 7, tzinfo=UTC), {time(2): 2}),
    ],
)
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("all_slots_are_kept")
def test_weeks_of_two_beats(
    clock: MovedClock, runtime_in: Any, *, zone: str, begin: datetime, changing: datetime, sundays: dict[time, int]
) -> None:
    """Each slot runs once although Redis is flushed, messages are repeated and beats restart without their state."""
    duration = weeks(sum(sundays.values()))
    move_to(clock, begin)
    fleet = Fleet(runtime_in(zone), clock, IN_A_YEAR, beats=2, seed=7)
    fleet.tick()
    fleet.sweep()

    while fleet.next_slot() < begin + duration:
        move_to(clock, fleet.next_slot() + seconds(1))
        fleet.tick()
        for _ in range(200):
            fleet.deliver(flush=0.35, repeat=0.3)
            if not fleet.waiting():
                break
            clock.advance(seconds(30))
            fleet.sweep()
        if clock.now().astimezone(ZoneInfo(zone)).weekday() == 3:
            fleet.restart_a_beat()

    expected = fleet.slots(begin, clock.now())
    assert fleet.settled() == expected
    assert {name: sum(task == name for task, _ in fleet.runs) for name in expected} == {
        name: len(slots) for name, slots in expected.items()
    }
    assert {len(expected[name]) for name in ("casebank.reflect", "maintenance.retain")} == {duration.days}
    assert len(expected["memory.decay"]) == 4 * duration.days
    prunes = [slot.astimezone(ZoneInfo(zone)) for slot in expected["casebank.prune"]]
    assert {slot.weekday() for slot in prunes} == {6}
    assert {at: sum(slot.time() == at for slot in prunes) for at in {slot.time() for slot in prunes}} == sundays
    assert {later - earlier for earlier, later in pairwise(slot.date() for slot in prunes)} <= {timedelta(days=7)}
    (of_that_day,) = (slot for slot in prunes if slot.date() == changing.astimezone(ZoneInfo(zone)).date())
    assert of_that_day.astimezone(UTC) == changing
    assert all(arguments == ({"dry_run": False} if name == "casebank.prune" else {}) for name, arguments in fleet.runs)
    assert fleet.lost > 4 * duration.days


@pytest.mark.long
@pytest.mark.parametrize("begin", [datetime(2027, 3, 28, tzinfo=UTC), datetime(2027, 10, 31, tzinfo=UTC)])
def test_each_minute_of_a_change_of_clocks(clock: MovedClock, runtime_in: Any, begin: datetime) -> None:
    """In the two hours around a change of the clocks, a minutely task runs once per minute."""
    move_to(clock, begin)
    fleet = Fleet(runtime_in(BERLIN), clock, ("sessions.expire_idle",), beats=2, seed=3)
    fleet.tick()
    fleet.sweep()

    while clock.now() < begin + hours(2):
        move_to(clock, fleet.next_slot() + seconds(0.5))
        fleet.tick()
        fleet.deliver(flush=0, repeat=0.3)

    assert fleet.settled() == {"sessions.expire_idle": [begin + timedelta(minutes=each) for each in range(1, 121)]}
    assert len(fleet.runs) == 120
    assert fleet.fired >= 240


def test_slots_run_without_any_beat(clock: MovedClock, runtime_in: Any) -> None:
    """Without a beat, the sweeper fires each slot within one sweep interval."""
    begin = clock.now()
    fleet = Fleet(runtime_in(BERLIN), clock, IN_A_YEAR, beats=0, seed=1)
    fleet.sweep()

    while clock.now() < begin + weeks(1):
        move_to(clock, fleet.next_slot() + seconds(5))
        fleet.sweep()
        fleet.deliver(flush=0, repeat=0)

    assert fleet.settled() == fleet.slots(begin, clock.now())


def test_after_a_weekend_of_downtime_the_newest_slot_of_each_is_caught_up(clock: MovedClock, runtime_in: Any) -> None:
    """After downtime, each entry's newest missed slot runs once, although two beats and the sweeper may fire it."""
    friday = datetime(2027, 6, 4, 12, tzinfo=UTC)
    move_to(clock, friday)
    fleet = Fleet(runtime_in(BERLIN), clock, IN_A_YEAR, beats=0, seed=1)
    fleet.sweep()

    move_to(clock, friday + hours(70))
    fleet.beats = [fleet.beat(), fleet.beat()]
    for _ in range(20):
        fleet.tick()
        fleet.sweep()
        fleet.deliver(flush=0, repeat=0.5)
        clock.advance(seconds(10))

    assert sorted(name for name, _ in fleet.runs) == sorted(IN_A_YEAR)
    assert fleet.settled() == {name: slots[-1:] for name, slots in fleet.slots(friday, clock.now()).items()}


@pytest.mark.exhaustive
def test_a_clock_set_back_runs_no_slot_twice(clock: MovedClock, runtime_in: Any) -> None:
    """After the clock is set back, no slot runs again, although beats and the sweeper fire slots again."""
    begin = clock.now()
    fleet = Fleet(runtime_in(BERLIN), clock, IN_A_YEAR, beats=2, seed=5)
    fleet.sweep()

    for back in (0, 30, 18, 0):
        clock.advance(-hours(back))
        fleet.restart_a_beat()
        for _ in range(48):
            clock.advance(hours(1))
            fleet.tick()
            fleet.sweep()
            fleet.deliver(flush=0, repeat=0.2)

    expected = fleet.slots(begin, clock.now())
    assert fleet.settled() == expected
    assert len(fleet.runs) == sum(len(slots) for slots in expected.values())


def test_entries_are_those_whose_task_exists(settings: Settings) -> None:
    """Beat has no entries for tasks that do not exist, for example in a release without the CaseBank."""
    assert active_entries(set(), settings) == {}
    found = active_entries({"memory.decay", "casebank.prune", "turns.run"}, settings)
    assert [entry.task for entry in found.values()] == ["memory.decay", "casebank.prune"]


def test_the_schedule_is_the_documented_one(settings: Settings) -> None:
    """The entries have their documented times, in the configured zone."""
    berlin = settings.model_copy(update={"timezone": BERLIN})

    described = {entry.task: entry.cadence.describe() for entry in active_entries(TASKS, berlin).values()}

    assert described == {
        "sessions.expire_idle": "each minute",
        "memory.consolidate": "daily at 00:00, 06:00, 12:00 and 18:00 Europe/Berlin",
        "memory.decay": "daily at 00:00, 06:00, 12:00 and 18:00 Europe/Berlin",
        "memory.refresh_hot": "daily at 00:00, 06:00, 12:00 and 18:00 Europe/Berlin",
        "casebank.prune": "Sundays at 02:00 Europe/Berlin",
        "casebank.advance": "each minute",
        "casebank.count": "each minute",
        "casebank.reflect": "daily at 03:30 Europe/Berlin",
        "maintenance.retain": "daily at 04:30 Europe/Berlin",
    }


def test_an_entry_is_due_when_its_slot_has_come(clock: MovedClock) -> None:
    """`is_due` returns whether a slot has passed since the last run, and the seconds until the next slot."""
    schedule = SlotSchedule(AtTimes(ZoneInfo(BERLIN), (time(2),), 6), clock)
    move_to(clock, datetime(2027, 3, 28, 0, 59, 50, tzinfo=UTC))
    since = clock.now()

    before = schedule.is_due(since)
    clock.advance(seconds(11))
    after = schedule.is_due(since)

    assert not before.is_due
    assert 9 < before.next <= 10
    assert after.is_due
    assert abs(after.next - (7 * 24 - 1) * 3_600) < 2
    assert not schedule.is_due(datetime(2027, 3, 28, 1, tzinfo=UTC)).is_due
    assert not schedule.is_due(clock.now()).is_due
    assert schedule.remaining_estimate(since) < timedelta()


def test_schedules_are_equal_by_their_cadence(clock: MovedClock) -> None:
    """Two schedules are equal if their cadences are equal, even if their clocks differ."""
    assert SlotSchedule(Every(), clock) == SlotSchedule(Every(), MovedClock())
    assert SlotSchedule(Every(), clock) != SlotSchedule(Every(2), clock)
    assert repr(SlotSchedule(Every(), clock)) == "<each minute>"


def test_a_firing_names_its_entry(settings: Settings, clock: MovedClock) -> None:
    """Beat publishes a task with the entry's arguments and queue, and with the entry's name in a header."""
    fired = beat_schedule(active_entries({"casebank.prune"}, settings), clock)["prune"]

    assert (fired["task"], fired["kwargs"]) == ("casebank.prune", {"dry_run": False})
    assert fired["options"] == {"queue": "maintenance", "serializer": "json", "headers": {"perdure_entry": "prune"}}


def test_a_task_that_would_not_settle_its_slots_is_refused(settings: Settings) -> None:
    """`configure_beat` refuses a task that is not a `ScheduledTask`, because it would never mark its slots as done."""
    app = Celery("tests", broker="memory://", set_as_current=False)

    def decay() -> None:
        """An ordinary task."""

    app.finalize()
    app.tasks.pop("memory.decay", None)  # removes the real task, if another test of this process has imported it
    app.task(decay, name="memory.decay", shared=False)

    with pytest.raises(TypeError, match=r"memory\.decay is not a ScheduledTask"):
        configure_beat(app, settings)


def test_each_check_of_the_schedule_touches_a_file(tmp_path: Path) -> None:
    """A probe sees that beat's loop runs. Where the file cannot be written, beat runs on."""
    app = Celery("tests", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {}
    (tmp_path / "file").touch()
    for alive in (tmp_path / "data" / "beat.alive", tmp_path / "file" / "beat.alive"):
        assert MemoryScheduler(app=app, alive=alive).tick() > 0

    assert [path.name for path in (tmp_path / "data").iterdir()] == ["beat.alive"]
