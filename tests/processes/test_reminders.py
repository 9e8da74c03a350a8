"""Users' schedules with two real workers. A test kills the worker that fires a schedule, before or after a commit."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.settings import Settings
from perdure.timetable import reminders
from tests.processes.faults import Place, wait_until
from tests.processes.installation import Installation

PLACES = [
    Place("before", "reminders.take_due"),
    Place("after", "reminders.take_due"),
    Place("before", "turns.accept"),
    Place("after", "turns.accept"),
]


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_after_a_kill_a_slot_becomes_one_turn(installation: Installation, place: Place) -> None:
    """A schedule's due time (slot) becomes exactly one turn, even if the worker that fires the schedule is killed."""
    workers = [installation.worker() for _ in range(2)]
    for worker in workers:
        worker.container.ready()
    installation.faults.arm(place)
    due = datetime.now(UTC) + timedelta(seconds=1)
    new = reminders.NewReminder(
        uuid4(), UserKey("ana"), "Water the plants.", reminders.Moment(None, "UTC", due), "http"
    )
    made = reminders.add(installation.database, Settings(_env_file=None), new)
    wait_until(installation.faults.fired, f"a worker dies at {place}", 30)
    (row,) = wait_until(lambda: installation.query("SELECT turn_id FROM turns"), "the slot is a turn", 30)
    (turn,) = installation.settled(row.turn_id)
    assert turn["status"] == "done"
    wait_until(lambda: not installation.query("SELECT FROM reminders"), "the schedule is removed", 30)
    [message] = installation.query("SELECT message_id FROM inbox")
    assert message.message_id == f"schedule:{made['schedule_id']}:{due.isoformat()}"
    installation.check()
