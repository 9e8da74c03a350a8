"""The keeper: a thread that renews all leases of its process in one statement.

The keeper stops renewing a lease `hold.GRACE_S` seconds after the deadline of the turn's present step. It also detects
cancelled turns and lost leases, and aborts model calls whose time limit has passed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.database.fencing import Fence
from perdure.errors import Unavailable, loggable
from perdure.sessions.states import State
from perdure.settings import TurnSettings
from perdure.turns.lease import queries
from perdure.turns.lease.claim import Claimed
from perdure.turns.lease.hold import Hold, all_held

log = logging.getLogger(__name__)

_WATCH_S = 1.0

_MOST_TOUCHED = 10_000
"""The most sessions that a process flushes at shutdown (`workers.shutdown.flush`): the last ones that it claimed."""


class Keeper:
    """Renews the leases of all sessions that this process holds."""

    def __init__(self, database: Database, clock: Clock, limits: TurnSettings) -> None:
        self._database = database
        self._clock = clock
        self._limits = limits
        self._holds: dict[UUID, Hold] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._renewed_at = clock.monotonic()
        self._thread = threading.Thread(target=self._run, name="perdure-keeper", daemon=True)
        self._draining = False
        self._touched: OrderedDict[UUID, Fence] = OrderedDict()
        self._has_dropped = False

    def start(self) -> None:
        """Start the thread. Call once."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Leases that the process still holds then expire."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_WATCH_S * 5)

    @contextmanager
    def holding(self, claim: Claimed) -> Iterator[Hold]:
        """Renew the lease of `claim` within the block."""
        hold = Hold(claim, self._clock, self._limits.lease_s)
        with self._lock:
            older = self._holds.get(claim.session_id)
            self._holds[claim.session_id] = hold
            self._touch(claim)
            draining = self._draining
        if older is not None:  # this process lost the session and has claimed it again
            older.lose()
        if draining:
            hold.drain()
        try:
            yield hold
        finally:
            with self._lock:
                if self._holds.get(claim.session_id) is hold:
                    del self._holds[claim.session_id]

    @property
    def running(self) -> int:
        """The number of sessions that this process holds, including sessions that it is ending."""
        return len(self._holds)

    @property
    def turns(self) -> int:
        """The number of running turns."""
        with self._lock:
            return sum(1 for hold in self._holds.values() if hold.turn_id is not None)

    def touched(self) -> list[tuple[UUID, Fence]]:
        """The last `_MOST_TOUCHED` sessions that this process claimed, newest claim first.

        Each session has the fence of its newest claim by this process.
        """
        with self._lock:
            return [*reversed(self._touched.items())]

    def release_all(self) -> list[tuple[UUID, State]]:
        """Release every lease, because the process must exit while turns run.

        Returns the released sessions with their states.
        """
        with self._lock:
            holds = list(self._holds.values())
        for hold in holds:
            hold.lose()
        rows = self._database.run(queries.RELEASE_ALL, all_held(holds), urgent=True) if holds else ()
        return [(row.session_id, State(row.state)) for row in rows]

    def park(self) -> int:
        """Stop the running turns at their next safe point; returns their number.

        Does not stop the ending of a session.
        """
        with self._lock:
            holds = [hold for hold in self._holds.values() if hold.turn_id is not None]
        for hold in holds:
            hold.drain()
        return len(holds)

    def drain(self) -> None:
        """Stop every turn at its next safe point, including turns that begin after this call."""
        with self._lock:
            self._draining = True
            holds = list(self._holds.values())
        for hold in holds:
            hold.drain()

    def beat(self) -> None:
        """Run one round: abort overdue model calls, renew leases, and stop turns that must not continue.

        A turn must not continue if it is cancelled or if its lease is lost.
        """
        with self._lock:
            holds = list(self._holds.values())
        for hold in holds:
            hold.expire_overdue()
        if not holds:
            self._renewed_at = self._clock.monotonic()
            return
        if self._clock.monotonic() - self._renewed_at >= self._limits.heartbeat_s - _WATCH_S / 2:
            self._renew([hold for hold in holds if hold.within_step()])
        self._watch([hold for hold in holds if hold.turn_id is not None])

    def _touch(self, claim: Claimed) -> None:
        self._touched[claim.session_id] = claim.fence
        self._touched.move_to_end(claim.session_id)
        if len(self._touched) <= _MOST_TOUCHED:
            return
        self._touched.popitem(last=False)
        if not self._has_dropped:
            self._has_dropped = True
            log.warning("more than %d sessions were held here: the oldest are not flushed at shutdown", _MOST_TOUCHED)

    def _run(self) -> None:
        pause = min(_WATCH_S, self._limits.heartbeat_s / 2)
        while not self._closed.wait(pause):
            try:
                self.beat()
            except Unavailable as error:
                log.warning("leases could not be renewed; the next beat tries again: %s", loggable(error))
            except Exception:
                log.exception("the keeper raised an error and continues")

    def _renew(self, holds: list[Hold]) -> None:
        asked_at = self._clock.monotonic()
        rows = self._database.run(
            queries.RENEW,
            {**all_held(holds), "lease_s": self._limits.lease_s},
            urgent=True,
        )
        renewed = {row.session_id for row in rows}
        for hold in holds:
            if hold.session_id in renewed:
                hold.renewed(asked_at)
        if len(renewed) == len(holds):
            self._renewed_at = asked_at  # otherwise some rows were locked: the next beat renews them

    def _watch(self, holds: list[Hold]) -> None:
        rows = self._database.run(
            queries.WATCH,
            {
                "session_ids": [hold.session_id for hold in holds],
                "turn_ids": [hold.turn_id for hold in holds],
            },
            urgent=True,
        )
        seen = {row.session_id: row for row in rows}
        for hold in holds:
            row = seen.get(hold.session_id)
            if row is None or Fence(row.token, row.nonce) != hold.fence:
                hold.lose()
            elif row.cancelled:
                hold.cancel(row.turn_id)
