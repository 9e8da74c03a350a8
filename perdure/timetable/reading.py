"""Reads the status of each entry of the schedule, for `perdure schedules list`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from perdure.database.engine import Database
from perdure.timetable import queries
from perdure.timetable.entry import ScheduleEntry


@dataclass(frozen=True, slots=True)
class EntryStatus:
    """The status of an entry. Times are in UTC; a time is `None` if the ledger does not contain it yet.

    `next_due` is in the past if the newest slot waits for a worker or for its next attempt. `running`: a worker has a
    lease on a slot. `error`: the error of the newest slot's last attempt.
    """

    entry: str
    task: str
    schedule: str
    since: datetime | None
    last_slot: datetime | None
    last_done_slot: datetime | None
    last_done_at: datetime | None
    running: bool
    attempts: int
    error: str | None
    next_due: datetime


def read_schedules(database: Database, entries: Iterable[ScheduleEntry]) -> list[EntryStatus]:
    known = list(entries)
    rows = {row.entry: row for row in database.run(queries.STANDING, {"entries": [entry.name for entry in known]})}
    return [_status(entry, rows[entry.name]) for entry in known]


def _status(entry: ScheduleEntry, row: Row[Any]) -> EntryStatus:
    return EntryStatus(
        entry=entry.name,
        task=entry.task,
        schedule=entry.cadence.describe(),
        since=row.since,
        last_slot=row.slot,
        last_done_slot=row.done_slot,
        last_done_at=row.done_at,
        running=bool(row.running),
        attempts=row.attempts or 0,
        error=row.error,
        next_due=_next_due(entry, row),
    )


def _next_due(entry: ScheduleEntry, row: Row[Any]) -> datetime:
    newest = entry.cadence.previous(row.now)
    waits = row.since is not None and row.since <= newest and not (row.done and row.slot == newest)
    return newest if waits else entry.cadence.next(row.now)
