"""When an entry's slots are: pure arithmetic over instants and a zone's local time.

A slot is an instant. `Every` counts minutes and heeds no local clock. `AtTimes` names local times
of day: one that does not exist on its day (the clocks go forward over it) means the first
instant after the gap; one that occurs twice means the first. Slots that fall on the same
instant in this way are one. For every cadence `previous(t) <= t < next(t)`, and no slot lies
between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import chain
from typing import Protocol
from zoneinfo import ZoneInfo

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
"""By `date.weekday()`."""

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)

# Within so many days of any instant, on either side, lies a slot of every cadence: a week,
# a day for a date that a zone left out, one for the distance between local dates and UTC's.
_DAYS_TO_A_SLOT = 9


class Cadence(Protocol):
    """Infinitely many slots in both directions, strictly ascending. Instants are aware, in UTC."""

    def previous(self, at: datetime) -> datetime:
        """The newest slot at or before `at`."""
        ...

    def next(self, at: datetime) -> datetime:
        """The first slot after `at`."""
        ...

    def describe(self) -> str:
        """How a person would say it."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Every so many minutes since the epoch, whatever local clocks show."""

    minutes: int = 1

    def __post_init__(self) -> None:
        if self.minutes < 1:
            raise ValueError(f"minutes is {self.minutes}: accepted: 1 or more")

    def previous(self, at: datetime) -> datetime:
        """The newest slot at or before `at`."""
        return _EPOCH + (at - _EPOCH) // self._step * self._step

    def next(self, at: datetime) -> datetime:
        """The first slot after `at`."""
        return self.previous(at) + self._step

    def describe(self) -> str:
        """How a person would say it."""
        return "each minute" if self.minutes == 1 else f"every {self.minutes} minutes"

    @property
    def _step(self) -> timedelta:
        return timedelta(minutes=self.minutes)


@dataclass(frozen=True, slots=True)
class AtTimes:
    """At local times of day in a zone, each day or on one weekday (Monday is 0)."""

    zone: ZoneInfo
    times: tuple[time, ...]
    weekday: int | None = None

    def __post_init__(self) -> None:
        if not self.times or list(self.times) != sorted(set(self.times)):
            raise ValueError(f"times are {self.times}: accepted: one or more, ascending")
        if self.weekday is not None and self.weekday not in range(len(WEEKDAYS)):
            raise ValueError(f"weekday is {self.weekday}: accepted: 0 (Monday) to 6 (Sunday)")

    def previous(self, at: datetime) -> datetime:
        """The newest slot at or before `at`."""
        return next(slot for slot in self._slots(at, backwards=True) if slot <= at)

    def next(self, at: datetime) -> datetime:
        """The first slot after `at`."""
        return next(slot for slot in self._slots(at) if slot > at)

    def describe(self) -> str:
        """How a person would say it."""
        *others, last = [f"{each:%H:%M}" for each in self.times]
        clock = f"{', '.join(others)} and {last}" if others else last
        return f"{'daily' if self.weekday is None else WEEKDAYS[self.weekday] + 's'} at {clock} {self.zone.key}"

    def _slots(self, at: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        """Slots around `at`, in order, beginning safely on its other side."""
        sign = -1 if backwards else 1
        today = at.astimezone(self.zone).date()
        days = (today + _DAY * sign * away for away in range(-1, _DAYS_TO_A_SLOT))
        return chain.from_iterable(self._slots_of(day)[::sign] for day in days)

    def _slots_of(self, day: date) -> list[datetime]:
        if self.weekday not in {None, day.weekday()}:
            return []
        return [instant(datetime.combine(day, each), self.zone) for each in self.times]


def times_every(hours: int) -> tuple[time, ...]:
    """The times of day every so many hours from local midnight; the last span of the day may be shorter."""
    return tuple(time(hour) for hour in range(0, 24, hours))


def instant(local: datetime, zone: ZoneInfo) -> datetime:
    """The instant in UTC at which the zone's clocks show `local` (naive), to the second.

    The first of two, whatever its `fold` says; where none does, the first instant after the gap.
    """
    local = local.replace(fold=0)
    found = local.replace(tzinfo=zone).astimezone(UTC)
    if _local(found, zone) == local:
        return found
    # In a gap, fold=0 reckons with the offset before it and fold=1 with the one after it: the
    # change itself lies between, the clocks showing less than `local` before and more after.
    before, after = local.replace(tzinfo=zone, fold=1).astimezone(UTC), found
    while after - before > _SECOND:
        middle = before + (after - before) // _SECOND // 2 * _SECOND
        before, after = (middle, after) if _local(middle, zone) < local else (before, middle)
    return after


def _local(at: datetime, zone: ZoneInfo) -> datetime:
    return at.astimezone(zone).replace(tzinfo=None)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
