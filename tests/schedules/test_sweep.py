"""The sweeper fires due slots that no worker has claimed, because beat may be down or messages lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, time
from zoneinfo import ZoneInfo

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.schedule.cadence import AtTimes
from perdure.schedule.entry import Entry
from perdure.schedule.ledger import FIRST_RETRY_S, claim, register, run_slot, settle
from perdure.schedule.sweep import sweep_slots
from perdure.settings import TurnSettings
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
    """A function that runs a round, `sweep_s` after the previous one, and returns the names of the fired entries."""

    def fire(entry: Entry) -> bool:
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
    """Move the clock to the first slot of both entries."""
    move_to(clock, ONE_O_CLOCK)


def test_nothing_is_due_before_its_time(sweep: Sweep) -> None:
    """Neither future slots nor slots before the entries were first seen are fired."""
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
    """If no worker runs, the queue must not grow by a message per round."""
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
    """The back-off of a slot's firings does not apply to the entry's next slot."""
    while clock.now() < ONE_O_CLOCK + hours(1) - seconds(10):
        sweep()

    move_to(clock, ONE_O_CLOCK + hours(1))

    assert "hourly" in (sweep() or [])


@pytest.mark.usefixtures("at_one")
def test_a_claimed_slot_is_not_fired_until_its_lease_expires(
    database: Database, clock: MovedClock, limits: TurnSettings, sweep: Sweep
) -> None:
    """After the lease has expired, the slot is fired within two rounds."""
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
    """A failed slot is not fired at once, since the cause of its failure probably persists."""
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
    """After one refusal the round ends, and no slot counts as fired."""
    offered: list[str] = []

    def refuse(entry: Entry) -> bool:
        offered.append(entry.name)
        return False

    clock.advance(seconds(limits.sweep_s))

    assert sweep_slots(database, limits, [HOURLY, OTHER], refuse) == []
    assert len(offered) == 1
    assert sweep() == ["hourly", "other"]


@pytest.mark.usefixtures("at_one")
def test_one_of_eight_sweepers_runs_the_round(
    database: Database, clock: MovedClock, limits: TurnSettings, wire: list[str]
) -> None:
    """Every worker sweeps, but a slot is fired once per round."""

    def fire(entry: Entry) -> bool:
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
    """If the row has the time of a later round, an earlier round must not conclude that a clock was wrong."""
    assert sweep() == []

    clock.advance(seconds(-0.5))

    assert sweep_slots(database, limits, [HOURLY, OTHER], lambda _: True) is None


def test_a_clock_that_was_years_ahead_stops_no_sweep(sweep: Sweep, clock: MovedClock) -> None:
    """A round that a wrong clock has dated years ahead must not delay the next round."""
    clock.advance(hours(24 * 365 * 4))
    assert sweep() == ["other", "hourly"]

    move_to(clock, ONE_O_CLOCK)

    assert sweep() == ["hourly", "other"]


def test_an_installation_without_entries_runs_no_statement(database: Database, limits: TurnSettings) -> None:
    """An empty schedule costs no statement."""
    statements: list[str] = []
    database.observe = lambda _, name: statements.append(name)

    assert sweep_slots(database, limits, [], lambda _: True) is None
    assert statements == []


def test_an_entrys_slots_begin_when_it_is_first_seen(database: Database, sweep: Sweep, clock: MovedClock) -> None:
    """Neither a claim nor a sweep finds an earlier slot of the entry."""
    late = replace(HOURLY, name="late")
    move_to(clock, ONE_O_CLOCK + hours(1))
    register(database, [late], 30)

    assert claim(database, late, 30) is None
    assert sweep() == ["other", "hourly"]
