"""One slot's life: taken, kept while its work runs, settled.

Keeps the law that a slot runs once. Which slot is meant is not said by whoever fires but
reckoned here, from the database's clock: the newest one, so that of those missed only one is
caught up, and a message that comes late, twice or after the clock was set back finds its slot
done. The lease is renewed by a thread beside the work, no longer than the entry allows.
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
from perdure.schedule import queries
from perdure.schedule.entry import Entry
from perdure.settings import TurnSettings

log = logging.getLogger(__name__)

FIRST_RETRY_S = 30.0
LONGEST_RETRY_S = 3_600.0

KEPT_DAYS = 14
KEPT_SLOTS = 100
"""Of each entry the ledger keeps the slots of so many days, and so many slots at the least."""

_LONGEST_ERROR = 1_000

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ClaimedSlot:
    """A slot that is ours to work on, under `token`, for the `attempts`-th time."""

    entry: str
    slot: datetime
    token: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """The slot's work was done here, with this result."""

    slot: datetime
    result: Result


@dataclass(frozen=True, slots=True)
class NotDue:
    """The entry's newest slot is done, is being worked on, or waits after a failure."""


def run_slot(
    database: Database, clock: Clock, limits: TurnSettings, entry: Entry, work: Callable[[], Result]
) -> Done[Result] | NotDue:
    """Do the work of the entry's newest slot, if it waits for somebody to do it.

    Raises:
        Unavailable: the database cannot be reached; a slot that was taken is free when its lease has run out.
        Exception: whatever the work raised; the slot is due again after a while.
    """
    taken = take(database, entry, limits.lease_s)
    if taken is None:
        return NotDue()
    try:
        with _kept(database, clock, limits, taken, entry.within_s):
            result = work()
    except Exception as error:
        fail(database, taken, error)
        raise
    settle(database, taken)
    return Done(taken.slot, result)


def register(database: Database, entries: list[Entry], lease_s: float) -> datetime:
    """Note which entries exist, and return the database's time.

    Raises:
        Unavailable: the database cannot be reached.
    """
    names = [entry.name for entry in entries]
    parameters = {"entries": names, "lease_s": lease_s, "longest_retry_s": LONGEST_RETRY_S}
    now: datetime = database.run(queries.REGISTER, parameters)[0].now
    return now


def take(database: Database, entry: Entry, lease_s: float) -> ClaimedSlot | None:
    """Take the entry's newest slot for `lease_s` seconds; None if it does not wait for anybody.

    Raises:
        Unavailable: the database cannot be reached.
    """
    slot = entry.cadence.previous(register(database, [entry], lease_s))
    retries = {"first_retry_s": FIRST_RETRY_S, "longest_retry_s": LONGEST_RETRY_S}
    rows = database.run(queries.TAKE, {"entry": entry.name, "slot": slot, "lease_s": lease_s, **retries})
    return ClaimedSlot(entry.name, slot, rows[0].token, rows[0].attempts) if rows else None


def renew(database: Database, taken: ClaimedSlot, lease_s: float) -> bool:
    """Keep the slot for `lease_s` seconds from now; False if it is somebody else's.

    Raises:
        Unavailable: the database cannot be reached.
    """
    return bool(database.run(queries.RENEW, {"entry": taken.entry, "token": taken.token, "lease_s": lease_s}))


def settle(database: Database, taken: ClaimedSlot) -> bool:
    """Mark the slot done; False if it was taken over, and its new holder will mark it.

    Raises:
        Unavailable: the database cannot be reached.
    """
    kept = {"kept_days": KEPT_DAYS, "kept_slots": KEPT_SLOTS}
    held = bool(database.run(queries.SETTLE, {**_names(taken), **kept}))
    if not held:
        log.warning("%s of %s took longer than its lease: another worker took it over", taken.entry, taken.slot)
    return held


def fail(database: Database, taken: ClaimedSlot, error: Exception) -> None:
    """Free the slot, whose work failed, for another attempt after a while.

    Raises:
        Unavailable: the database cannot be reached.
    """
    reason = loggable(error)[:_LONGEST_ERROR].replace("\0", "")
    retries = {"first_retry_s": FIRST_RETRY_S, "longest_retry_s": LONGEST_RETRY_S}
    rows = database.run(queries.FAIL, {**_names(taken), **retries, "error": reason})
    again = f"again at {rows[0].retry_at}" if rows else "another worker took it over"
    log.warning("%s of %s failed at attempt %d: %s; %s", taken.entry, taken.slot, taken.attempts, reason, again)


@contextmanager
def _kept(
    database: Database, clock: Clock, limits: TurnSettings, taken: ClaimedSlot, within_s: float
) -> Iterator[None]:
    over = threading.Event()
    deadline = clock.monotonic() + within_s

    def keep() -> None:
        while not over.wait(limits.heartbeat_s) and clock.monotonic() < deadline:
            try:
                if not renew(database, taken, limits.lease_s):
                    return
            except Unavailable as error:
                log.warning("could not keep %s of %s: %s", taken.entry, taken.slot, error.message)

    keeper = threading.Thread(target=keep, name=f"perdure-keep-{taken.entry}", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _names(taken: ClaimedSlot) -> dict[str, object]:
    return {"entry": taken.entry, "slot": taken.slot, "token": taken.token}
