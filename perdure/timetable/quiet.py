"""Quiet hours: the part of each day, in local time, in which users' schedules do not fire."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

from perdure.settings import ScheduleSettings
from perdure.timetable.cadence import instant

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class QuietHours:
    """The local times from `begin` until `end`. If `end` is before `begin`, `end` is on the next day."""

    begin: time
    end: time

    @classmethod
    def of(cls, settings: ScheduleSettings) -> QuietHours | None:
        return None if settings.quiet_times is None else cls(*settings.quiet_times)

    def over(self, at: datetime, zone: ZoneInfo) -> datetime:
        """The end of the quiet hours if `at` is within them, otherwise `at`."""
        local = at.astimezone(zone)
        now, within_a_day = local.time(), self.begin < self.end
        quiet = self.begin <= now < self.end if within_a_day else now >= self.begin or now < self.end
        if not quiet:
            return at
        day = local.date() + (_DAY if not within_a_day and now >= self.begin else timedelta())
        end = instant(datetime.combine(day, self.end), zone)
        if end <= at:  # the clocks were set back: `at` is in the second occurrence of an hour
            end = datetime.combine(day, self.end, tzinfo=zone).replace(fold=1).astimezone(UTC)
        return end
