"""What `perdure schedules list` shows: each entry, the last slot run, the next one due."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from perdure.database.engine import Database
from perdure.schedule import queries
from perdure.schedule.entry import Entry


@dataclass(frozen=True, slots=True)
class EntryStatus:
    """Where an entry stands. Times are instants in UTC; a slot is None where there is none yet.

    `next_due` lies in the past where the newest slot waits: to be taken, or for its next attempt.
    `running` says that somebody works on a slot now; `error` is of the newest slot's last attempt.
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


def read_schedules(database: Database, entries: Iterable[Entry]) -> list[EntryStatus]:
    """Each entry's standing, in the entries' order.

    Raises:
        Unavailable: the database cannot be reached.
    """
    known = list(entries)
    rows = {row.entry: row for row in database.run(queries.STANDING, {"entries": [entry.name for entry in known]})}
    return [_standing(entry, rows[entry.name]) for entry in known]


def _standing(entry: Entry, row: Row[Any]) -> EntryStatus:
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


def _next_due(entry: Entry, row: Row[Any]) -> datetime:
    newest = entry.cadence.previous(row.now)
    waits = row.since is not None and row.since <= newest and not (row.done and row.slot == newest)
    return newest if waits else entry.cadence.next(row.now)
