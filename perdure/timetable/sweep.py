"""Fires due slots that no worker has claimed.

Every worker runs this sweep in addition to the sweep of turns, but only one worker executes each round. Celery's beat
is optional. Without beat, a slot fires at most one sweep interval late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import takewhile

from perdure.database.engine import Database
from perdure.settings import TurnSettings
from perdure.timetable import queries
from perdure.timetable.entry import ScheduleEntry
from perdure.timetable.ledger import register

log = logging.getLogger(__name__)

Fire = Callable[[ScheduleEntry], bool]
"""Publishes the entry's task within about a second; returns whether the broker accepted it. Never raises."""


def sweep_slots(
    database: Database, limits: TurnSettings, entries: Iterable[ScheduleEntry], fire: Fire
) -> list[ScheduleEntry] | None:
    """Execute one round; returns the fired entries, or None if another worker executes the round.

    Fires the newest slot of each entry. Does not fire a slot that is done, waits for its next attempt, or precedes the
    entry's registration. Does not fire an entry on which a worker has a lease. If no worker claims a fired slot, a
    later round fires the slot again, after a delay that doubles each time.
    """
    known = {entry.name: entry for entry in entries}
    if not known or not database.run(queries.TAKE_ROUND, {"every_s": limits.sweep_s}):
        return None
    now = register(database, list(known.values()), limits.lease_s)
    newest = {name: entry.cadence.previous(now) for name, entry in known.items()}
    parameters = {"entries": list(newest), "slots": list(newest.values()), "every_s": limits.sweep_s}
    due = [known[row.entry] for row in database.run(queries.DUE, parameters)]
    fired = list(takewhile(fire, due))
    if fired:
        names = [entry.name for entry in fired]
        database.run(queries.FIRED, {"entries": names, "slots": [newest[name] for name in names]})
    if due:
        log.info("swept: fired %d schedule slots, %d refused", len(fired), len(due) - len(fired))
    return fired
