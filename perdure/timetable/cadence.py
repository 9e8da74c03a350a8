"""Computes the slots of an entry, in UTC or in a zone's local time, without side effects.

A slot is an instant at which the entry's task is due. `Every` counts minutes since the epoch, independent of a zone.
`AtTimes` has local times of day. If the clocks skip a local time, its slot is the first instant after the gap. If a
local time occurs twice, its slot is the first occurrence. Local times that map to the same instant are one slot. For
every cadence, `previous(t) <= t < next(t)`, and no slot lies between `previous(t)` and `next(t)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import chain, islice
from typing import Protocol
from zoneinfo import ZoneInfo

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
"""The names of the weekdays, indexed by `date.weekday()`."""

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)

# The maximum number of days between an instant and its previous or next slot: seven for a week, one for a date that a
# zone skipped, and one for the difference between local dates and UTC dates.
_DAYS_TO_A_SLOT = 9


class Cadence(Protocol):
    """An infinite, strictly ascending sequence of slots. Every `datetime` is timezone-aware and in UTC."""

    def previous(self, at: datetime) -> datetime:
        """The newest slot at or before `at`."""
        ...

    def next(self, at: datetime) -> datetime:
        """The first slot after `at`."""
        ...

    def describe(self) -> str:
        """A description of the cadence for people."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Every `minutes` minutes since the epoch."""

    minutes: int = 1

    def __post_init__(self) -> None:
        if self.minutes < 1:
            raise ValueError(f"minutes is {self.minutes}: accepted: 1 or more")

    def previous(self, at: datetime) -> datetime:
        return _EPOCH + (at - _EPOCH) // self._step * self._step

    def next(self, at: datetime) -> datetime:
        return self.previous(at) + self._step

    def describe(self) -> str:
        return "each minute" if self.minutes == 1 else f"every {self.minutes} minutes"

    @property
    def _step(self) -> timedelta:
        return timedelta(minutes=self.minutes)


@dataclass(frozen=True, slots=True)
class AtTimes:
    """Local times of day in a zone, each day or on one weekday (Monday is 0)."""

    zone: ZoneInfo
    times: tuple[time, ...]
    weekday: int | None = None

    def __post_init__(self) -> None:
        if not self.times or list(self.times) != sorted(set(self.times)):
            raise ValueError(f"times are {self.times}: accepted: one or more, ascending")
        if self.weekday is not None and self.weekday not in range(len(WEEKDAYS)):
            raise ValueError(f"weekday is {self.weekday}: accepted: 0 (Monday) to 6 (Sunday)")

    def previous(self, at: datetime) -> datetime:
        return next(slot for slot in self._slots(at, backwards=True) if slot <= at)

    def next(self, at: datetime) -> datetime:
        return next(slot for slot in self._slots(at) if slot > at)

    def describe(self) -> str:
        """A description of the cadence for people."""
        *others, last = [f"{each:%H:%M}" for each in self.times]
        clock = f"{', '.join(others)} and {last}" if others else last
        return f"{'daily' if self.weekday is None else WEEKDAYS[self.weekday] + 's'} at {clock} {self.zone.key}"

    def _slots(self, at: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        """Slots in ascending order from a day before `at`, or, if `backwards`, in descending order from a day after."""
        sign = -1 if backwards else 1
        today = at.astimezone(self.zone).date()
        days = (today + _DAY * sign * days for days in range(-1, _DAYS_TO_A_SLOT))
        return chain.from_iterable(self._slots_of(day)[::sign] for day in days)

    def _slots_of(self, day: date) -> list[datetime]:
        if self.weekday not in {None, day.weekday()}:
            return []
        return [instant(datetime.combine(day, each), self.zone) for each in self.times]


def times_every(hours: int) -> tuple[time, ...]:
    """The times of day at intervals of `hours` hours from midnight; the last interval of a day may be shorter."""
    return tuple(time(hour) for hour in range(0, 24, hours))


def next_runs(first: datetime, following: Callable[[datetime], datetime], now: datetime, most: int) -> list[datetime]:
    """At most `most` runs: `first`, which may be in the past if it waits, and those that follow it after `now`."""

    def runs() -> Iterator[datetime]:
        run = first
        while True:
            yield run
            run = following(max(run, now))

    return list(islice(runs(), most))


def instant(local: datetime, zone: ZoneInfo) -> datetime:
    """The instant in UTC at which the clocks of `zone` show the naive time `local`.

    If the clocks show `local` twice, returns the first instant and ignores the `fold` of `local`. If the clocks skip
    `local`, returns the first instant after the gap, to the second.
    """
    local = local.replace(fold=0)
    found = local.replace(tzinfo=zone).astimezone(UTC)
    if _local(found, zone) == local:
        return found
    # In a gap, fold=0 uses the UTC offset before the gap, and fold=1 uses the offset after the gap. The transition lies
    # between the two resulting instants. Bisect for the first instant at which the local time is at least `local`.
    before, after = local.replace(tzinfo=zone, fold=1).astimezone(UTC), found
    while after - before > _SECOND:
        middle = before + (after - before) // _SECOND // 2 * _SECOND
        before, after = (middle, after) if _local(middle, zone) < local else (before, middle)
    return after


def _local(at: datetime, zone: ZoneInfo) -> datetime:
    return at.astimezone(zone).replace(tzinfo=None)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
