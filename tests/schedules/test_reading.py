"""`read_schedules` shows operators each entry's last and next slots, and whether a slot is running."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import TurnSettings
from perdure.timetable.ledger import claim, register, run_slot
from perdure.timetable.reading import EntryStatus, read_schedules
from tests.schedules.conftest import HOURLY, START, hours, move_to, seconds

ONE_O_CLOCK = datetime(2027, 3, 1, 13, tzinfo=UTC)


def _read(database: Database) -> EntryStatus:
    return read_schedules(database, [HOURLY])[0]


def test_an_entry_that_no_worker_has_seen_is_due_at_its_next_slot(database: Database) -> None:
    """A fresh installation can list its schedule before any worker has run."""
    assert _read(database) == EntryStatus(
        entry="hourly",
        task="tests.hourly",
        schedule="every 60 minutes",
        since=None,
        last_slot=None,
        last_done_slot=None,
        last_done_at=None,
        running=False,
        attempts=0,
        error=None,
        next_due=ONE_O_CLOCK,
    )


def test_a_slot_is_listed_as_waiting_running_and_done(
    database: Database, clock: MovedClock, limits: TurnSettings
) -> None:
    """While a slot waits or runs, `next_due` is the time of that slot."""
    register(database, [HOURLY], limits.lease_s)
    move_to(clock, ONE_O_CLOCK + seconds(60))
    waiting = _read(database)
    seen: list[EntryStatus] = []
    run_slot(database, clock, limits, HOURLY, lambda: seen.append(_read(database)))
    done = _read(database)

    assert waiting.since is not None
    assert abs(waiting.since - START) < seconds(20)
    assert (waiting.last_slot, waiting.next_due, waiting.running) == (None, ONE_O_CLOCK, False)
    assert (seen[0].last_slot, seen[0].next_due, seen[0].running) == (ONE_O_CLOCK, ONE_O_CLOCK, True)
    assert (done.last_done_slot, done.next_due, done.running) == (ONE_O_CLOCK, ONE_O_CLOCK + hours(1), False)
    assert done.last_done_at is not None
    assert abs(done.last_done_at - clock.now()) < seconds(20)


def test_a_worker_that_died_is_not_running(database: Database, clock: MovedClock, limits: TurnSettings) -> None:
    """After a dead worker's lease expires, the slot is shown as due. The last completed slot is still shown."""
    register(database, [HOURLY], limits.lease_s)
    move_to(clock, ONE_O_CLOCK + seconds(60))
    run_slot(database, clock, limits, HOURLY, lambda: None)
    move_to(clock, ONE_O_CLOCK + hours(1) + seconds(60))
    claim(database, HOURLY, limits.lease_s)
    clock.advance(seconds(limits.lease_s + 10))

    read = _read(database)

    assert (read.running, read.last_slot, read.last_done_slot) == (False, ONE_O_CLOCK + hours(1), ONE_O_CLOCK)
    assert read.next_due == ONE_O_CLOCK + hours(1)


@pytest.mark.parametrize("order", [("b", "a"), ("a", "b")])
def test_entries_are_listed_in_their_order(database: Database, order: tuple[str, str]) -> None:
    """`read_schedules` keeps the order of the given entries."""
    assert [each.entry for each in read_schedules(database, [replace(HOURLY, name=name) for name in order])] == [*order]
