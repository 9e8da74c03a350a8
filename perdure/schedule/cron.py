"""A cadence from a cron expression in a zone's local time, for users' schedules. Pure.

`cronsim` evaluates the expression on local times without a zone; `cadence.instant` maps them to instants. A local time
in a gap means the first instant after the gap, and a time that occurs twice means the first occurrence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from perdure.schedule.cadence import instant

LONGEST = 100
"""The most characters of an expression."""

_FIELDS = 5
_TWICE = timedelta(hours=3)
"""Longer than any clock change. The search for a slot begins this far away, since a local time may occur twice."""

ACCEPTED = "accepted: minute, hour, day of the month, month and day of the week, such as `30 7 * * MON-FRI`"


@dataclass(frozen=True, slots=True)
class Cron:
    """The slots of a cron expression of five fields in `zone`."""

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
        """The expression and its zone, for people."""
        return f"{self.expression} {self.zone.key}"

    def _from(self, local: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        return CronSim(self.expression.upper(), local, reverse=backwards)
