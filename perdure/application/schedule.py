"""Adds perdure's schedule entries to an application's Celery beat, whatever scheduler that beat uses.

Beat only publishes an entry's task. The task claims the entry's slot in PostgreSQL. A late, repeated or missing message
is therefore harmless: a task without a due slot does nothing, and workers fire the slots that no task has claimed.

So an entry may fire more often than it has slots. Each entry is a plain interval or crontab, which every scheduler can
store. A crontab fires in every hour, at the minutes of the slots, since the application's time zone may differ from
`PERDURE_TIMEZONE`.
"""

from __future__ import annotations

import atexit
import logging
from datetime import timedelta
from typing import Any

from celery import Celery
from celery.schedules import crontab, schedule
from celery.signals import beat_init, import_modules

from perdure.assembly import database_address
from perdure.errors import Unavailable
from perdure.schedules.entries import active_entries
from perdure.settings import Settings
from perdure.timetable.cadence import AtTimes, Cadence, Every
from perdure.timetable.entry import options
from perdure.workers.celery_application import TASKS
from perdure.workers.shutdown.beat import report

log = logging.getLogger(__name__)

PREFIX = "perdure."
"""The prefix of perdure's entries in `beat_schedule`."""


def add_entries(app: Celery, settings: Settings) -> None:
    """Add perdure's entries to the schedule of `app` when Celery loads the modules of `app`, and when beat starts.

    A module of `app` may replace `beat_schedule`, which removes perdure's entries. The missing entries are therefore
    added again when beat starts.
    """

    def load(**_: Any) -> None:
        app.conf.beat_schedule = {**(app.conf.beat_schedule or {}), **entries(settings)}

    def begin(sender: Any, **_: Any) -> None:
        if sender.app is app:
            _report(settings)
            missing = {name: entry for name, entry in entries(settings).items() if name not in found(sender)}
            sender.scheduler.update_from_dict(missing)

    def found(service: Any) -> Any:
        return service.scheduler.schedule

    import_modules.connect(load, sender=app, weak=False)
    beat_init.connect(begin, weak=False)


def _report(settings: Settings) -> None:
    """Report that this beat runs. A beat that has no address of the database works without."""
    try:
        database_url = database_address(settings)
    except Unavailable as error:
        log.info("this beat is not reported: %s", error.message)
    else:
        atexit.register(report(settings, database_url).stop)


def entries(settings: Settings) -> dict[str, dict[str, Any]]:
    return {
        PREFIX + name: {
            "task": entry.task,
            "schedule": _plain(entry.cadence),
            "kwargs": dict(entry.arguments),
            "options": options(entry),
        }
        for name, entry in active_entries(TASKS, settings).items()
    }


def _plain(cadence: Cadence) -> schedule:
    match cadence:
        case Every(minutes):
            return schedule(timedelta(minutes=minutes))
        case AtTimes(times=times):
            return crontab(minute=",".join(str(minute) for minute in sorted({each.minute for each in times})))
        case _:
            raise TypeError(f"{cadence!r} has no plain schedule")
