"""Computes slots from a cron expression in a zone's local time, for users' schedules, without side effects.

`cronsim` computes the expression's local times, without a zone; this module maps each local time to instants. If the
clocks change, slots follow cron(8) of Debian:

- An expression whose minute or hour begins with `*` is an interval. It follows the clocks: a local time that occurs
  twice is two slots, and a local time that the clocks skip is none. So `*/15 * * * *` has a slot each 15 minutes.
- Any other expression names times of day. A local time that occurs twice is one slot, at its first occurrence. A local
  time that the clocks skip becomes the first instant after the gap, unless the gap is longer than three hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import merge
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from perdure.timetable.cadence import instant

LONGEST = 100
"""The maximum length of an expression, in characters."""

_FIELDS = 5
_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_CORRECTION = timedelta(hours=3)
"""A longer gap is a correction of the clocks, such as a skipped date, and not a change to summer time."""

ACCEPTED = "accepted: minute, hour, day of the month, month and day of the week, such as `30 7 * * MON-FRI`"


@dataclass(frozen=True, slots=True)
class Cron:
    """The slots of a cron expression with five fields, in the local time of `zone`."""

    expression: str
    zone: ZoneInfo

    def __post_init__(self) -> None:
        """Check the expression.

        Raises:
            ValueError: the expression is invalid or never fires; the message says which.
        """
        if len(self.expression) > LONGEST or len(self.expression.split()) != _FIELDS:
            raise ValueError(f"must have {_FIELDS} fields; {ACCEPTED}")
        try:
            first = next(CronSim(self.expression.upper(), datetime(2000, 1, 1)), None)  # noqa: DTZ001 (a local time)
        except CronSimError as error:
            raise ValueError(f"{str(error).lower()}; {ACCEPTED}") from None
        if first is None:
            raise ValueError(f"never fires; {ACCEPTED}")

    def previous(self, at: datetime) -> datetime:
        """The newest slot at or before `at`."""
        return next(slot for slot in self._slots(at, backwards=True) if slot <= at)

    def next(self, at: datetime) -> datetime:
        """The first slot after `at`."""
        return next(slot for slot in self._slots(at) if slot > at)

    def describe(self) -> str:
        return f"{self.expression} {self.zone.key}"

    @property
    def _is_interval(self) -> bool:
        minute, hour, *_ = self.expression.split()
        return minute.startswith("*") or hour.startswith("*")

    def _slots(self, at: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        """All slots after `at` and a few earlier ones, ascending; if `backwards`, the reverse. A slot may repeat."""
        # The clocks may change within a day of `at`. The search begins at a local time that is early enough, or late
        # enough if `backwards`, by the offset on either side of the change.
        at = at.astimezone(UTC)
        offsets = (_offset(each, self.zone) for each in (at, at - _DAY if backwards else at + _DAY))
        start = at.replace(tzinfo=None) + (max(offsets) + _SECOND if backwards else min(offsets) - _SECOND)
        if not self._is_interval:
            return (slot for local in self._locals(start, backwards=backwards) for slot in self._once(local))
        # Each sequence is ordered, although the second occurrence of 02:00 is later than the first of 02:45.
        occurrences = [self._occurrences(start, fold, backwards=backwards) for fold in (0, 1)]
        return merge(*occurrences, reverse=backwards)

    def _locals(self, start: datetime, *, backwards: bool) -> Iterator[datetime]:
        return CronSim(self.expression.upper(), start, reverse=backwards)

    def _occurrences(self, start: datetime, fold: int, *, backwards: bool) -> Iterator[datetime]:
        """The first (`fold` is 0) or last (1) occurrence of each local time that the clocks show."""
        for local in self._locals(start, backwards=backwards):
            slot = local.replace(tzinfo=self.zone, fold=fold).astimezone(UTC)
            if slot.astimezone(self.zone).replace(tzinfo=None) == local:
                yield slot

    def _once(self, local: datetime) -> Iterator[datetime]:
        slot = instant(local, self.zone)
        if slot.astimezone(self.zone).replace(tzinfo=None) - local <= _CORRECTION:
            yield slot


def _offset(at: datetime, zone: ZoneInfo) -> timedelta:
    return at.astimezone(zone).replace(tzinfo=None) - at.replace(tzinfo=None)
