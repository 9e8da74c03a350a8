"""Claims a slot, renews the slot's lease while its work runs, and settles the slot when the work is done.

A settled slot never runs again. The message that fires a slot does not name the slot: `claim` computes the newest slot
from the database's clock. If several slots were missed, only the newest runs. A message may be late or a duplicate, and
the database's clock may be set back. If the newest slot is settled when a message arrives, no slot runs. A thread
renews the lease during the work, for at most `ScheduleEntry.within_s` seconds.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import Unavailable, loggable
from perdure.settings import TurnSettings
from perdure.timetable import queries
from perdure.timetable.entry import ScheduleEntry

log = logging.getLogger(__name__)

FIRST_RETRY_S = 30.0
LONGEST_RETRY_S = 3_600.0

KEPT_DAYS = 14
KEPT_SLOTS = 100
"""The ledger keeps an entry's slots for `KEPT_DAYS` days, and the newest `KEPT_SLOTS` slots regardless of age."""

_LONGEST_ERROR = 1_000

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ClaimedSlot:
    """A slot that this process has claimed under `token`. `attempts` counts the slot's attempts, including this one."""

    entry: str
    slot: datetime
    token: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """This process did the work of `slot`; `result` is the work's return value."""

    slot: datetime
    result: Result


@dataclass(frozen=True, slots=True)
class SlotNotDue:
    """This process did no work: the entry's newest slot is not due, or another worker has claimed the entry.

    A slot is not due if it is done, waits for its next attempt, or precedes the entry's registration.
    """


def run_slot(
    database: Database, clock: Clock, limits: TurnSettings, entry: ScheduleEntry, work: Callable[[], Result]
) -> Done[Result] | SlotNotDue:
    """Do the work of the entry's newest slot, if the slot is due.

    Raises:
        Unavailable: the database cannot be reached; a claimed slot becomes free when its lease expires.
        Exception: the work failed; the slot is due again after a delay.
    """
    claimed = claim(database, entry, limits.lease_s)
    if claimed is None:
        return SlotNotDue()
    try:
        with _renewed(database, clock, limits, claimed, entry.within_s):
            result = work()
    except Exception as error:
        fail(database, claimed, error)
        raise
    settle(database, claimed)
    return Done(claimed.slot, result)


def register(database: Database, entries: list[ScheduleEntry], lease_s: float) -> datetime:
    """Store the entries that the ledger does not have yet, and return the database's time."""
    names = [entry.name for entry in entries]
    parameters = {"entries": names, "lease_s": lease_s, "longest_retry_s": LONGEST_RETRY_S}
    now: datetime = database.run(queries.REGISTER, parameters)[0].now
    return now


def claim(database: Database, entry: ScheduleEntry, lease_s: float) -> ClaimedSlot | None:
    """Claim the entry's newest slot for `lease_s` seconds; None if the slot is not due or has been claimed."""
    slot = entry.cadence.previous(register(database, [entry], lease_s))
    retries = {"first_retry_s": FIRST_RETRY_S, "longest_retry_s": LONGEST_RETRY_S}
    rows = database.run(queries.CLAIM, {"entry": entry.name, "slot": slot, "lease_s": lease_s, **retries})
    return ClaimedSlot(entry.name, slot, rows[0].token, rows[0].attempts) if rows else None


def renew(database: Database, claimed: ClaimedSlot, lease_s: float) -> bool:
    """Renew the lease for `lease_s` seconds; returns False if another worker has claimed the entry."""
    return bool(database.run(queries.RENEW, {"entry": claimed.entry, "token": claimed.token, "lease_s": lease_s}))


def settle(database: Database, claimed: ClaimedSlot) -> bool:
    """Mark the slot done; returns False if another worker has claimed the entry."""
    kept = {"kept_days": KEPT_DAYS, "kept_slots": KEPT_SLOTS}
    held = bool(database.run(queries.SETTLE, {**_identity(claimed), **kept}))
    if not held:
        log.warning(
            "schedule entry %s, slot %s took longer than its lease: another worker claimed it",
            claimed.entry,
            claimed.slot,
        )
    return held


def fail(database: Database, claimed: ClaimedSlot, error: Exception) -> None:
    """Release a slot whose work failed. The slot is due again after a delay."""
    reason = loggable(error)[:_LONGEST_ERROR].replace("\0", "")
    retries = {"first_retry_s": FIRST_RETRY_S, "longest_retry_s": LONGEST_RETRY_S}
    rows = database.run(queries.FAIL, {**_identity(claimed), **retries, "error": reason})
    outlook = f"next attempt at {rows[0].retry_at}" if rows else "another worker claimed it"
    log.warning(
        "schedule entry %s, slot %s: attempt %d failed: %s; %s",
        claimed.entry,
        claimed.slot,
        claimed.attempts,
        reason,
        outlook,
    )


@contextmanager
def _renewed(
    database: Database, clock: Clock, limits: TurnSettings, claimed: ClaimedSlot, within_s: float
) -> Iterator[None]:
    over = threading.Event()
    deadline = clock.monotonic() + within_s

    def keep() -> None:
        while not over.wait(limits.heartbeat_s) and clock.monotonic() < deadline:
            try:
                if not renew(database, claimed, limits.lease_s):
                    return
            except Unavailable as error:
                log.warning(
                    "schedule entry %s, slot %s: the lease could not be renewed: %s",
                    claimed.entry,
                    claimed.slot,
                    error.message,
                )

    keeper = threading.Thread(target=keep, name=f"perdure-keep-{claimed.entry}", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _identity(claimed: ClaimedSlot) -> dict[str, object]:
    return {"entry": claimed.entry, "slot": claimed.slot, "token": claimed.token}
