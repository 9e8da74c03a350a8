"""Computes slots from a cron expression in a zone's local time, for users' schedules, without side effects.

`cronsim` computes the expression's local times, without a zone. `cadence.instant` then maps each local time to an
instant. A local time that the clocks skip becomes the first instant after the gap. A local time that occurs twice
becomes its first occurrence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from perdure.timetable.cadence import instant

LONGEST = 100
"""The maximum length of an expression, in characters."""

_FIELDS = 5
_TWICE = timedelta(hours=3)
"""The search for a slot begins at this distance from the local time of `at`.

The distance is longer than any clock change. Therefore the search misses no slot if a local time occurs twice.
"""

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
        local = at.astimezone(self.zone).replace(tzinfo=None)
        found = (instant(each, self.zone) for each in self._from(local + _TWICE, backwards=True))
        return next(slot for slot in found if slot <= at)

    def next(self, at: datetime) -> datetime:
        """The first slot after `at`."""
        local = at.astimezone(self.zone).replace(tzinfo=None)
        found = (instant(each, self.zone) for each in self._from(local - _TWICE))
        return next(slot for slot in found if slot > at)

    def describe(self) -> str:
        return f"{self.expression} {self.zone.key}"

    def _from(self, local: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        return CronSim(self.expression.upper(), local, reverse=backwards)
