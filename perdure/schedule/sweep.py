"""The sweeper's part in schedules: a slot that is due and has nobody working on it is fired again.

Runs in every worker beside the sweep of turns; one of them takes the round. It needs no beat:
with every beat dead, slots run as late as a sweep is apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import takewhile

from perdure.database.engine import Database
from perdure.schedule import queries
from perdure.schedule.entry import Entry
from perdure.schedule.ledger import register
from perdure.settings import TurnSettings

log = logging.getLogger(__name__)

Fire = Callable[[Entry], bool]
"""Publishes the entry's task within about a second; whether the broker took it. Never raises."""


def sweep_slots(database: Database, limits: TurnSettings, entries: Iterable[Entry], fire: Fire) -> list[Entry] | None:
    """One round: the entries that were fired, or None if the round is somebody else's.

    An entry's slot is due if it is the newest one, not before the entry was first seen, and
    not taken, or taken under a lease that ran out. Fired again, if nobody takes it, after a
    pause that doubles with each time.

    Raises:
        Unavailable: the database cannot be reached.
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
