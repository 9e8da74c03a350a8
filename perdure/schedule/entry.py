"""An entry of the schedule: a name for ever, a cadence, and the task that does a slot's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.schedule.cadence import Cadence


@dataclass(frozen=True)
class Entry:
    """What runs when. `name` keys the ledger: an entry that is renamed is a new one.

    A slot's lease is renewed for at most `within_s` seconds: work that takes longer is taken
    to hang, and another worker begins it again.
    """

    name: str
    cadence: Cadence
    task: str
    queue: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    within_s: float = 3_600
