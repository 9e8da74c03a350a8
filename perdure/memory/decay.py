"""How a memory fades: what it is worth by now, and when it is put away.

What it is worth is always computed from what it was worth when it was formed and from its age,
never from the value before: a run that comes twice, late or never changes nothing about the
next one. The formula stands here twice, as a function and as SQL, for a hundred thousand rows
are not fetched to be multiplied; a test holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from perdure.database.engine import Database
from perdure.memory import queries

BASE_RATE = 0.001
"""Lost in an hour, as a power of e, by what nobody reads."""

KIND_RATES = {"fact": 0.3, "preference": 0.5, "insight": 0.7, "conversation": 1.0}
FLOOR = 0.3
"""Of what a memory was worth in the beginning, so much stays."""

ARCHIVE_BELOW = 0.03
ARCHIVE_AFTER_DAYS = 30

_A_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class DecayResult:
    """What a run did: memories it looked at, those whose value changed, those put away."""

    looked_at: int = 0
    changed: int = 0
    archived: int = 0


def decay_rate(kind: str, channels: int, accesses: int, connections: int) -> float:
    """The share that is lost in an hour, as a power of e.

    Slower the more channels a memory was met on, the more often it was read, and the more
    relations it has; with ten of them it does not fade at all.
    """
    spread = 1 / (1 + 0.2 * channels)
    use = 1 + 0.3 * math.log(1 + accesses)
    return BASE_RATE * KIND_RATES[kind] * spread / use * (1 - min(1.0, 0.1 * connections))


def decayed(importance: float, rate: float, hours: float) -> float:
    """What a memory of `importance` is worth at an age of `hours`, at a rate of `decay_rate`."""
    return max(importance * math.exp(-rate * max(hours, 0.0)), FLOOR * importance)


def is_faded(value: float, age_days: float, unread_days: float) -> bool:
    """Whether a memory is put away: worth little, old, and not read for long."""
    return value < ARCHIVE_BELOW and age_days > ARCHIVE_AFTER_DAYS and unread_days > ARCHIVE_AFTER_DAYS


def decay(database: Database, progress: Callable[[int], None] = lambda _: None) -> DecayResult:
    """Bring the value of every memory up to now, and put away what has faded.

    Each thousand is a commit of its own. `progress` is told how many were looked at so far.

    Raises:
        Unavailable: the database cannot be reached; what was done stays done.
    """
    parameters = {
        "base_rate": BASE_RATE,
        "kinds": list(KIND_RATES),
        "rates": list(KIND_RATES.values()),
        "floor": FLOOR,
        "archive_below": ARCHIVE_BELOW,
        "archive_after_days": ARCHIVE_AFTER_DAYS,
        "most": _A_BATCH,
    }
    done, after = DecayResult(), UUID(int=0)
    while True:
        row = database.run(queries.DECAY, {**parameters, "after": after})[0]
        done = DecayResult(done.looked_at + row.looked_at, done.changed + row.changed, done.archived + row.archived)
        progress(done.looked_at)
        if row.looked_at < _A_BATCH:
            return done
        after = row.last
