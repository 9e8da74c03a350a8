"""The sweeper fires due slots that no worker has claimed, for example because beat is down or a message is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, time
from zoneinfo import ZoneInfo

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import TurnSettings
from perdure.timetable.cadence import AtTimes
from perdure.timetable.entry import ScheduleEntry
from perdure.timetable.ledger import FIRST_RETRY_S, claim, register, run_slot, settle
from perdure.timetable.sweep import sweep_slots
from tests.schedules.conftest import HOURLY, hours, move_to, seconds

OTHER = replace(HOURLY, name="other", cadence=AtTimes(ZoneInfo("Asia/Kolkata"), (time(18, 30),)))  # 13:00 UTC
ONE_O_CLOCK = datetime(2027, 3, 1, 13, tzinfo=UTC)

Sweep = Callable[[], list[str] | None]


@pytest.fixture
def wire() -> list[str]:
    """The names of the fired entries."""
    return []


@pytest.fixture
def sweep(database: Database, clock: MovedClock, limits: TurnSettings, wire: list[str]) -> Sweep:
    """A function that advances the clock by `sweep_s`, executes a round, and returns the fired entries' names."""

    def fire(entry: ScheduleEntry) -> bool:
        wire.append(entry.name)
        return True

    def run() -> list[str] | None:
        clock.advance(seconds(limits.sweep_s))
        fired = sweep_slots(database, limits, [HOURLY, OTHER], fire)
        return None if fired is None else [entry.name for entry in fired]

    run()  # registers the entries
    return run


@pytest.fixture
def at_one(sweep: Sweep, clock: MovedClock) -> None:
    """Move the clock to 13:00, the first slot of `HOURLY` and `OTHER`."""
    move_to(clock, ONE_O_CLOCK)


def test_nothing_is_due_before_its_time(sweep: Sweep) -> None:
    """The sweeper fires neither future slots nor slots from before the entries' registration."""
    assert sweep() == []


@pytest.mark.usefixtures("at_one")
def test_a_due_slot_is_fired_until_it_is_done(
    database: Database, clock: MovedClock, limits: TurnSettings, sweep: Sweep
) -> None:
    """Without a beat, the sweeper fires a due slot until it is done."""
    assert sweep() == ["hourly", "other"]
    run_slot(database, clock, limits, HOURLY, lambda: None)
    assert [fired for fired in (sweep() for _ in range(4)) if fired] == [["other"]]
    run_slot(database, clock, limits, OTHER, lambda: None)
    assert [sweep() for _ in range(20)] == [[]] * 20
    move_to(clock, ONE_O_CLOCK + hours(1))
    assert sweep() == ["hourly"]


@pytest.mark.usefixtures("at_one")
def test_firings_that_no_worker_claims_become_rarer(sweep: Sweep, wire: list[str], clock: MovedClock) -> None:
    """The sweeper fires an unclaimed slot at growing intervals, so that a queue without workers fills slowly."""
    gaps: list[float] = []
    last = clock.now()
    while len(gaps) < 7:
        wire.clear()
        sweep()
        if "other" in wire:
            gaps.append((clock.now() - last).total_seconds())
            last = clock.now()

    assert gaps == sorted(gaps)
    assert gaps[-1] > 100


@pytest.mark.long
@pytest.mark.usefixtures("at_one")
def test_the_next_slot_does_not_wait_for_the_back_off(sweep: Sweep, clock: MovedClock) -> None:
    """The growing interval between a slot's firings does not delay the entry's next slot."""
    while clock.now() < ONE_O_CLOCK + hours(1) - seconds(10):
        sweep()

    move_to(clock, ONE_O_CLOCK + hours(1))

    assert "hourly" in (sweep() or [])


@pytest.mark.usefixtures("at_one")
def test_a_claimed_slot_is_not_fired_until_its_lease_expires(
    database: Database, clock: MovedClock, limits: TurnSettings, sweep: Sweep
) -> None:
    """The sweeper fires a claimed slot only after the slot's lease expires, and then within two rounds."""
    sweep()
    assert claim(database, HOURLY, limits.lease_s) is not None
    claimed_at, fired_at = clock.now(), None
    while fired_at is None:
        fired_at = clock.now() if "hourly" in (sweep() or []) else None

    assert limits.lease_s - 1 < (fired_at - claimed_at).total_seconds() < limits.lease_s + 2 * limits.sweep_s + 1
    second = claim(database, HOURLY, limits.lease_s)
    assert second is not None
    assert second.attempts == 2
    assert settle(database, second)


@pytest.mark.usefixtures("at_one")
def test_a_failure_is_fired_again_after_its_pause(
    database: Database, clock: MovedClock, limits: TurnSettings, sweep: Sweep
) -> None:
    """The sweeper waits before it fires a failed slot again, because the cause of the failure may persist."""
    sweep()
    with pytest.raises(ZeroDivisionError):
        run_slot(database, clock, limits, HOURLY, lambda: 1 // 0)
    failed_at = clock.now()

    while "hourly" not in (sweep() or []):
        pass

    assert FIRST_RETRY_S - 1 < (clock.now() - failed_at).total_seconds() < FIRST_RETRY_S + 2 * limits.sweep_s


@pytest.mark.usefixtures("at_one")
def test_a_refused_firing_is_repeated_in_the_next_round(
    database: Database, clock: MovedClock, limits: TurnSettings, sweep: Sweep
) -> None:
    """If the broker refuses a message, the round ends. The next round fires the slots."""
    offered: list[str] = []

    def refuse(entry: ScheduleEntry) -> bool:
        offered.append(entry.name)
        return False

    clock.advance(seconds(limits.sweep_s))

    assert sweep_slots(database, limits, [HOURLY, OTHER], refuse) == []
    assert len(offered) == 1
    assert sweep() == ["hourly", "other"]


def test_a_round_a_little_early_is_not_skipped(
    database: Database, clock: MovedClock, limits: TurnSettings, sweep: Sweep
) -> None:
    """A worker attempts once per interval: an attempt a little before the due time takes the round."""
    clock.advance(seconds(-limits.sweep_s / 10))
    assert sweep() == []
    clock.advance(seconds(-limits.sweep_s / 2))
    assert sweep() is None


@pytest.mark.usefixtures("at_one")
def test_one_of_eight_sweepers_runs_the_round(
    database: Database, clock: MovedClock, limits: TurnSettings, wire: list[str]
) -> None:
    """One of eight concurrent sweepers executes the round, and fires each due slot once."""

    def fire(entry: ScheduleEntry) -> bool:
        wire.append(entry.name)
        return True

    clock.advance(seconds(limits.sweep_s))
    with ThreadPoolExecutor(8) as pool:
        rounds = list(pool.map(lambda _: sweep_slots(database, limits, [HOURLY, OTHER], fire), range(8)))

    assert [each for each in rounds if each is not None] == [[HOURLY, OTHER]]
    assert wire == ["hourly", "other"]


def test_rounds_out_of_order_count_as_one(
    database: Database, clock: MovedClock, limits: TurnSettings, sweep: Sweep
) -> None:
    """If the clock goes back half a second after a round, the next sweep does not repeat the round."""
    assert sweep() == []

    clock.advance(seconds(-0.5))

    assert sweep_slots(database, limits, [HOURLY, OTHER], lambda _: True) is None


def test_a_clock_that_was_years_ahead_stops_no_sweep(sweep: Sweep, clock: MovedClock) -> None:
    """A round that was recorded while the clock was years ahead does not delay the next round."""
    clock.advance(hours(24 * 365 * 4))
    assert sweep() == ["other", "hourly"]

    move_to(clock, ONE_O_CLOCK)

    assert sweep() == ["hourly", "other"]


def test_an_installation_without_entries_runs_no_statement(database: Database, limits: TurnSettings) -> None:
    """Without schedule entries, a sweep runs no SQL statement."""
    statements: list[str] = []
    database.observe = lambda _, name: statements.append(name)

    assert sweep_slots(database, limits, [], lambda _: True) is None
    assert statements == []


def test_an_entrys_slots_begin_when_it_is_first_seen(database: Database, sweep: Sweep, clock: MovedClock) -> None:
    """A slot from before the entry's registration is neither claimed nor fired."""
    late = replace(HOURLY, name="late")
    move_to(clock, ONE_O_CLOCK + hours(1))
    register(database, [late], 30)

    assert claim(database, late, 30) is None
    assert sweep() == ["other", "hourly"]
