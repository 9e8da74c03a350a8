"""An entry of the schedule: a name, a cadence, and the task that does a slot's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.schedule.cadence import Cadence

HEADER = "perdure_entry"
"""The header of a task message that fires an entry; its value is the entry's name."""


@dataclass(frozen=True)
class Entry:
    """A scheduled task. `name` is the key in the ledger, so a renamed entry counts as a new entry.

    A slot's lease is renewed for at most `within_s` seconds. Work that takes longer counts as hung, and another worker
    repeats it.
    """

    name: str
    cadence: Cadence
    task: str
    queue: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    within_s: float = 3_600


def options(entry: Entry) -> dict[str, Any]:
    """The options of Celery's `apply_async` for a firing of `entry`."""
    return {"queue": entry.queue, "serializer": "json", "headers": {HEADER: entry.name}}
