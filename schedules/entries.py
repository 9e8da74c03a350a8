"""The schedule entries of perdure's periodic tasks. Times of day are in `PERDURE_TIMEZONE`.

Turns and deliveries need no entry: the sweeper in every worker finds those that are due.
"""

from __future__ import annotations

from collections.abc import Container
from datetime import time
from zoneinfo import ZoneInfo

from perdure.settings import Settings
from perdure.timetable.cadence import AtTimes, Every, times_every
from perdure.timetable.entry import ScheduleEntry

_SUNDAY = 6
_HOUR_S = 3_600


def active_entries(tasks: Container[str], settings: Settings) -> dict[str, ScheduleEntry]:
    """The entries whose task is in `tasks`, by name. Omits `suggest` if suggestions are disabled."""
    zone = ZoneInfo(settings.timezone)
    hours = settings.consolidation.interval_hours
    every_interval = AtTimes(zone, times_every(hours))
    listed = (
        ScheduleEntry("expire_idle", Every(minutes=1), "sessions.expire_idle", "sessions", within_s=600),
        ScheduleEntry("consolidate", every_interval, "memory.consolidate", "memory", within_s=hours * _HOUR_S),
        ScheduleEntry("decay", every_interval, "memory.decay", "memory"),
        ScheduleEntry("refresh_hot", every_interval, "memory.refresh_hot", "memory"),
        ScheduleEntry(
            "prune",
            AtTimes(zone, (time(2),), _SUNDAY),
            "casebank.prune",
            "maintenance",
            {"dry_run": False},
            6 * _HOUR_S,
        ),
        ScheduleEntry("advance", Every(minutes=1), "casebank.advance", "maintenance", within_s=6 * _HOUR_S),
        ScheduleEntry("count_uses", Every(minutes=1), "casebank.count", "maintenance", within_s=600),
        ScheduleEntry("reflect", AtTimes(zone, (time(3, 30),)), "casebank.reflect", "maintenance"),
        ScheduleEntry("suggest", Every(minutes=1), "casebank.suggest", "maintenance", within_s=600),
        ScheduleEntry("retain", AtTimes(zone, (time(4, 30),)), "maintenance.retain", "maintenance"),
    )
    suggests = settings.casebank.suggestions
    return {entry.name: entry for entry in listed if entry.task in tasks and (suggests or entry.name != "suggest")}
