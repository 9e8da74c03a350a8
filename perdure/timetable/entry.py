"""An entry of the schedule: a name, a cadence, and the task to run at each of the cadence's slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.timetable.cadence import Cadence

HEADER = "perdure_entry"
"""The header of each task message that fires an entry. The header's value is the entry's name."""


@dataclass(frozen=True)
class ScheduleEntry:
    """A scheduled task. `name` is the key in the ledger, so a renamed entry counts as a new entry.

    While the task runs, its worker renews the slot's lease for at most `within_s` seconds. A task that runs longer
    counts as hung, and another worker runs it again.
    """

    name: str
    cadence: Cadence
    task: str
    queue: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    within_s: float = 3_600


def options(entry: ScheduleEntry) -> dict[str, Any]:
    """The options for Celery's `apply_async` to publish the task message that fires `entry`."""
    return {"queue": entry.queue, "serializer": "json", "headers": {HEADER: entry.name}}
