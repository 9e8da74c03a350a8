"""A slot (a due time of a schedule entry) runs once despite concurrent claims, crashes and clock changes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import ProviderError, Unavailable
from perdure.settings import TurnSettings
from perdure.timetable import queries
from perdure.timetable.cadence import Every
from perdure.timetable.entry import ScheduleEntry
from perdure.timetable.ledger import (
    FIRST_RETRY_S,
    KEPT_SLOTS,
    LONGEST_RETRY_S,
    ClaimedSlot,
    Done,
    SlotNotDue,
    claim,
    fail,
    register,
    renew,
    run_slot,
    settle,
)
from perdure.timetable.reading import EntryStatus, read_schedules
from tests.schedules.conftest import HOURLY, START, Ask, hours, move_to, seconds

LEASE_S = 30
ONE_O_CLOCK = datetime(2027, 3, 1, 13, tzinfo=UTC)
PATIENCE_S = 20
THREADS = 8


@pytest.fixture(autouse=True)
def _first_seen(database: Database) -> None:
    """Register the entry at 12:00:30."""
    register(database, [HOURLY], LEASE_S)


@pytest.fixture
def at_one(clock: MovedClock) -> None:
    """Set the clock to 13:01. The first slot, 13:00, is then due."""
    move_to(clock, ONE_O_CLOCK + seconds(60))


def _claimed(database: Database, entry: ScheduleEntry = HOURLY) -> ClaimedSlot:
    found = claim(database, entry, LEASE_S)
    assert found is not None
    return found


def _status(database: Database, entry: ScheduleEntry = HOURLY) -> EntryStatus:
    return read_schedules(database, [entry])[0]


def test_no_slot_from_before_the_entry_existed(database: Database) -> None:
    """A slot from before the entry's registration cannot be claimed."""
    assert claim(database, HOURLY, LEASE_S) is None
    assert _status(database).next_due == ONE_O_CLOCK


@pytest.mark.usefixtures("at_one")
def test_it_runs_once(database: Database, clock: MovedClock, limits: TurnSettings) -> None:
    """Only the first of several firings of a slot runs the work."""
    ran: list[int] = []

    outcomes = [run_slot(database, clock, limits, HOURLY, lambda: ran.append(1)) for _ in range(3)]

    assert outcomes == [Done(ONE_O_CLOCK, None), SlotNotDue(), SlotNotDue()]
    assert ran == [1]
    assert _status(database).last_done_slot == ONE_O_CLOCK


def test_one_of_eight_threads_claims_the_slot(database: Database, clock: MovedClock) -> None:
    """Exactly one of eight concurrent claims of a slot succeeds. The test repeats this for ten slots."""
    gate = threading.Barrier(THREADS)

    def contend(_: int) -> ClaimedSlot | None:
        gate.wait(PATIENCE_S)
        return claim(database, HOURLY, LEASE_S)

    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(1, 11):
            move_to(clock, ONE_O_CLOCK + hours(number) + seconds(1))
            (won,) = [found for found in pool.map(contend, range(THREADS)) if found is not None]
            assert (won.slot, won.token, won.attempts) == (ONE_O_CLOCK + hours(number), number, 1)
            assert settle(database, won)


@pytest.mark.usefixtures("at_one")
def test_claims_during_the_settling_find_it_done(database: Database, clock: MovedClock, limits: TurnSettings) -> None:
    """If workers try to claim a slot while another worker marks it as done, the slot does not run again."""
    gate = threading.Barrier(THREADS)
    ran: list[datetime] = []

    def contend(_: int) -> None:
        gate.wait(PATIENCE_S)
        for _ in range(10):
            run_slot(database, clock, limits, HOURLY, lambda: ran.append(clock.now()))

    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(1, 6):
            move_to(clock, ONE_O_CLOCK + hours(number) + seconds(1))
            list(pool.map(contend, range(THREADS)))
            assert len(ran) == number


@pytest.mark.usefixtures("at_one")
def test_another_worker_claims_a_crashed_workers_slot_after_the_lease(database: Database, clock: MovedClock) -> None:
    """After a crash the slot stays claimed until its lease expires. Then another worker can claim it."""
    first = _claimed(database)

    clock.advance(seconds(LEASE_S - 2))
    assert claim(database, HOURLY, LEASE_S) is None
    clock.advance(seconds(3))
    second = _claimed(database)

    assert (second.slot, second.attempts) == (ONE_O_CLOCK, 2)
    assert not settle(database, first), "a worker whose lease has expired must not settle the slot for its successor"
    assert settle(database, second)
    assert claim(database, HOURLY, LEASE_S) is None


@pytest.mark.usefixtures("at_one")
def test_a_slot_that_keeps_killing_its_worker_backs_off(database: Database, clock: MovedClock) -> None:
    """Each crash counts as an attempt, and lengthens the pause before the next attempt.

    The entry's next slot starts without a pause.
    """
    _claimed(database)
    waits = []
    for _ in range(4):
        waited = 0
        while claim(database, HOURLY, LEASE_S) is None:
            clock.advance(seconds(10))
            waited += 10
        waits.append(waited)

    assert waits == sorted(waits)
    assert waits[0] <= LEASE_S + 10
    assert waits[-1] >= FIRST_RETRY_S * 4
    move_to(clock, ONE_O_CLOCK + hours(1) + seconds(60))
    assert _claimed(database).attempts == 1


@pytest.mark.usefixtures("at_one")
def test_a_renewed_slot_is_not_claimed_again(database: Database, clock: MovedClock) -> None:
    """As long as a worker renews its lease on a slot, no other worker can claim the slot."""
    claimed = _claimed(database)
    for _ in range(6):
        clock.advance(seconds(LEASE_S - 5))
        assert renew(database, claimed, LEASE_S)
        assert claim(database, HOURLY, LEASE_S) is None
    assert settle(database, claimed)


@pytest.mark.usefixtures("at_one")
def test_the_lease_is_renewed_while_the_work_runs(database: Database, clock: MovedClock, limits: TurnSettings) -> None:
    """A thread renews the lease during the work."""
    eager = limits.model_copy(update={"heartbeat_s": 0.01})
    renewed = threading.Event()
    database.observe = lambda moment, name: renewed.set() if (moment, name) == ("after", queries.RENEW.name) else None

    def work() -> str:
        clock.advance(seconds(LEASE_S + 10))
        renewed.clear()
        assert renewed.wait(PATIENCE_S)
        assert claim(database, HOURLY, LEASE_S) is None
        return "worked"

    assert run_slot(database, clock, eager, HOURLY, work) == Done(ONE_O_CLOCK, "worked")


@pytest.mark.usefixtures("at_one")
def test_the_lease_of_hanging_work_is_not_renewed_for_ever(
    database: Database, clock: MovedClock, limits: TurnSettings
) -> None:
    """A hanging task's lease is renewed for at most `within_s` seconds, and then expires.

    After another worker claims the slot, the hanging task's worker cannot mark the slot as done.
    """
    eager = limits.model_copy(update={"heartbeat_s": 0.01})
    brief = replace(HOURLY, within_s=60)

    def work() -> None:
        clock.advance(seconds(61))
        keeper = next(each for each in threading.enumerate() if each.name == "perdure-keep-hourly")
        keeper.join(PATIENCE_S)
        assert not keeper.is_alive()
        clock.advance(seconds(LEASE_S + 10))
        assert _claimed(database).attempts == 2

    run_slot(database, clock, eager, brief, work)

    assert _status(database).last_done_slot is None


@pytest.mark.usefixtures("at_one")
def test_work_that_fails_is_tried_again_after_a_pause(
    database: Database, clock: MovedClock, limits: TurnSettings
) -> None:
    """If the work fails, `run_slot` stores the error and raises it. The slot is due again after a pause."""

    def work() -> None:
        raise ProviderError("the provider refused")

    with pytest.raises(ProviderError, match="refused"):
        run_slot(database, clock, limits, HOURLY, work)

    assert _status(database).error == "PROVIDER_ERROR: the provider refused"
    assert not _status(database).running
    assert run_slot(database, clock, limits, HOURLY, work) == SlotNotDue()
    clock.advance(seconds(FIRST_RETRY_S + 1))
    assert run_slot(database, clock, limits, HOURLY, lambda: 2) == Done(ONE_O_CLOCK, 2)
    assert _status(database).error is None


@pytest.mark.usefixtures("at_one")
def test_a_failed_slot_does_not_delay_the_next(database: Database, clock: MovedClock) -> None:
    """An entry's next slot does not wait for the end of a failed slot's pause."""
    claimed = _claimed(database)
    for _ in range(8):
        fail(database, claimed, RuntimeError("no"))
        clock.advance(seconds(LONGEST_RETRY_S / 4))
        claimed = claim(database, HOURLY, LEASE_S) or claimed

    move_to(clock, ONE_O_CLOCK + hours(5) + seconds(1))

    fail(database, claimed, RuntimeError("no"))
    assert _claimed(database).slot == ONE_O_CLOCK + hours(5)


@pytest.mark.usefixtures("at_one")
def test_the_next_slot_waits_for_a_long_run(database: Database, clock: MovedClock) -> None:
    """Two slots of an entry do not run concurrently."""
    slow = _claimed(database)
    move_to(clock, ONE_O_CLOCK + hours(1) - seconds(5))
    assert renew(database, slow, LEASE_S)
    clock.advance(seconds(10))

    assert claim(database, HOURLY, LEASE_S) is None
    assert settle(database, slow)
    assert _claimed(database).slot == ONE_O_CLOCK + hours(1)


def test_only_the_newest_missed_slot_is_caught_up(database: Database, clock: MovedClock, limits: TurnSettings) -> None:
    """After sixty hours of downtime an hourly entry runs once, not sixty times."""
    move_to(clock, ONE_O_CLOCK + hours(60) + seconds(600))

    outcomes = [run_slot(database, clock, limits, HOURLY, lambda: None) for _ in range(5)]

    assert outcomes == [Done(ONE_O_CLOCK + hours(60), None)] + [SlotNotDue()] * 4


def test_a_clock_set_back_runs_nothing_twice(database: Database, clock: MovedClock, limits: TurnSettings) -> None:
    """A slot that is done does not run again after the clock is set back."""
    ran: list[datetime] = []

    def work() -> None:
        ran.append(clock.now())

    for back in (0, 3, 2):
        clock.advance(-hours(back))
        for _ in range(6):
            clock.advance(hours(0.5))
            run_slot(database, clock, limits, HOURLY, work)

    slots = {HOURLY.cadence.previous(when) for when in ran}
    assert len(slots) == len(ran) == 4


def test_a_clock_that_was_years_ahead_blocks_nothing(database: Database, clock: MovedClock, ask: Ask) -> None:
    """If a wrong clock stored future times for an entry (registration, lease, retry), `register` corrects them."""
    far = ScheduleEntry("seen by a wrong clock", Every(60), "tests.far", "maintenance")
    move_to(clock, START + hours(24 * 365 * 4))
    register(database, [far], LEASE_S)
    clock.advance(hours(1))
    fail(database, _claimed(database, far), RuntimeError("no"))
    _claimed(database)

    move_to(clock, ONE_O_CLOCK + seconds(60))
    register(database, [HOURLY, far], LEASE_S)

    assert ask("SELECT count(*) FROM schedule_entries WHERE since <= perdure_now()")[0].count == 2
    assert claim(database, HOURLY, LEASE_S) is None, "its holder may be alive, and has the time of a lease to renew it"
    clock.advance(seconds(LEASE_S + 10))
    assert _claimed(database).slot == ONE_O_CLOCK
    move_to(clock, ONE_O_CLOCK + hours(1) + seconds(1))
    assert _claimed(database, far).slot == ONE_O_CLOCK + hours(1)


@pytest.mark.usefixtures("at_one")
def test_a_worker_keeps_its_slot_when_the_clock_is_set_back(database: Database, clock: MovedClock) -> None:
    """After the clock is set back, a worker can still renew its lease. No other worker can claim the slot."""
    claimed = _claimed(database)
    clock.advance(-hours(0.5))
    register(database, [HOURLY], LEASE_S)
    for _ in range(5):
        clock.advance(seconds(10))
        assert renew(database, claimed, LEASE_S)
        assert claim(database, HOURLY, LEASE_S) is None
    assert settle(database, claimed)


@pytest.mark.usefixtures("at_one")
def test_an_unavailable_database_is_no_failure_of_the_work(
    database: Database, clock: MovedClock, limits: TurnSettings
) -> None:
    """If the database is unavailable when the work is done, the slot can be claimed again after its lease expires."""
    state = {"down": False}

    def lose(moment: str, name: str) -> None:
        if state["down"] and moment == "before":
            raise Unavailable("The database cannot be reached; please try again.")

    database.observe = lose

    with pytest.raises(Unavailable):
        run_slot(database, clock, limits, HOURLY, lambda: state.update(down=True))

    state["down"] = False
    assert claim(database, HOURLY, LEASE_S) is None
    clock.advance(seconds(LEASE_S + 10))
    assert _claimed(database).attempts == 2


@pytest.mark.long
def test_the_ledger_does_not_grow_for_ever(
    database: Database, clock: MovedClock, limits: TurnSettings, ask: Ask
) -> None:
    """Slots older than `KEPT_DAYS` days are deleted, except each entry's newest `KEPT_SLOTS` slots."""
    often = ScheduleEntry("often", Every(60 * 12), "tests.often", "maintenance")
    register(database, [often], LEASE_S)
    for _ in range(KEPT_SLOTS + 20):
        clock.advance(hours(12))
        assert isinstance(run_slot(database, clock, limits, often, lambda: None), Done)

    kept = ask("SELECT count(*), min(slot) AS oldest FROM schedule_slots WHERE entry = 'often'")[0]

    assert kept.count == KEPT_SLOTS
    assert clock.now() - kept.oldest >= hours(12 * (KEPT_SLOTS - 1))
