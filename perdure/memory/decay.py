"""Decay: updates the value of each memory, and archives old memories of low value that were not recalled recently.

The value is always computed from the importance and the age, never from the previous value. Repeated runs therefore do
not lower the value further. A run writes only the values that have changed noticeably (see `NOTICEABLE`). The formula
exists twice: as Python functions, and in the SQL that updates the rows in place. A test checks that both agree.

Called by the task `memory.decay` every six hours, and by the command `perdure memory decay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from perdure.database.engine import Database
from perdure.memory import queries

BASE_RATE = 0.001
"""The rate of exponential decay per hour, before `decay_rate` applies its factors."""

KIND_RATES = {"fact": 0.3, "preference": 0.5, "insight": 0.7, "conversation": 1.0}
FLOOR = 0.3
"""A memory's value never falls below this fraction of its importance."""

ARCHIVE_BELOW = 0.03
ARCHIVE_AFTER_DAYS = 30

NOTICEABLE = 0.005
"""A value is written if it has changed by more than this fraction of the importance.

Recall weights the value by 0.15, so a smaller change of the value does not change what a search finds.
"""

_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class DecayResult:
    """The numbers of memories examined, changed and archived. `changed` includes the archived memories."""

    looked_at: int = 0
    changed: int = 0
    archived: int = 0


def decay_rate(kind: str, channels: int, accesses: int, connections: int) -> float:
    """The rate of a memory's exponential decay, per hour.

    More channels, accesses and relations (`connections`) reduce the rate. With ten or more relations the rate is 0.
    """
    spread = 1 / (1 + 0.2 * channels)
    use = 1 + 0.3 * math.log(1 + accesses)
    return BASE_RATE * KIND_RATES[kind] * spread / use * (1 - min(1.0, 0.1 * connections))


def decayed(importance: float, rate: float, hours: float) -> float:
    return max(importance * math.exp(-rate * max(hours, 0.0)), FLOOR * importance)


def is_faded(value: float, age_days: float, unread_days: float) -> bool:
    return value < ARCHIVE_BELOW and age_days > ARCHIVE_AFTER_DAYS and unread_days > ARCHIVE_AFTER_DAYS


def decay(database: Database, progress: Callable[[int], None] = lambda _: None) -> DecayResult:
    """Update the values of all memories and archive the faded ones (see `is_faded`), in batches of `_BATCH`.

    `progress` receives the number of memories examined so far.

    Raises:
        Unavailable: the database cannot be reached; committed batches stay.
    """
    parameters = {
        "base_rate": BASE_RATE,
        "kinds": list(KIND_RATES),
        "rates": list(KIND_RATES.values()),
        "floor": FLOOR,
        "noticeable": NOTICEABLE,
        "archive_below": ARCHIVE_BELOW,
        "archive_after_days": ARCHIVE_AFTER_DAYS,
        "most": _BATCH,
    }
    done, after = DecayResult(), UUID(int=0)
    while True:
        row = database.run(queries.DECAY, {**parameters, "after": after})[0]
        done = DecayResult(done.looked_at + row.looked_at, done.changed + row.changed, done.archived + row.archived)
        progress(done.looked_at)
        if row.looked_at < _BATCH:
            return done
        after = row.last
