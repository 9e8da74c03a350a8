"""The keeper: a thread that renews all leases of its process in one statement.

The keeper stops renewing a lease `tenure.GRACE_S` seconds after the deadline of the turn's present step. It also
detects cancelled turns and lost leases, and aborts model calls whose time limit has passed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.database.fencing import Fence
from perdure.errors import Unavailable, loggable
from perdure.sessions.states import State
from perdure.settings import TurnSettings
from perdure.turns.lease import leave_queries, queries
from perdure.turns.lease.tenure import Tenure, all_fenced

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
        self._tenures: dict[UUID, Tenure] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._renewed_at = clock.monotonic()
        self._thread = threading.Thread(target=self._run, name="perdure-keeper", daemon=True)
        self._shutting_down = False
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
    def keep(self, tenure: Tenure) -> Iterator[Tenure]:
        """Renew the lease of `tenure` within the block."""
        with self._lock:
            older = self._tenures.get(tenure.session_id)
            self._tenures[tenure.session_id] = tenure
            self._touched[tenure.session_id] = tenure.fence
            self._touched.move_to_end(tenure.session_id)
            too_many = len(self._touched) > _MOST_TOUCHED
            if too_many:
                self._touched.popitem(last=False)
            shutting_down = self._shutting_down
        if too_many and not self._has_dropped:
            self._has_dropped = True
            log.warning("more than %d sessions were held here: the oldest are not flushed at shutdown", _MOST_TOUCHED)
        if older is not None:  # this process lost the session and has claimed it again
            older.lose()
        if shutting_down:
            tenure.begin_shutdown()
        try:
            yield tenure
        finally:
            with self._lock:
                if self._tenures.get(tenure.session_id) is tenure:
                    del self._tenures[tenure.session_id]

    def keep_fenced(self, session_id: UUID, fence: Fence) -> AbstractContextManager[Tenure]:
        """Renew, within the block, the lease of a session that is held under `fence` while no turn of it runs."""
        return self.keep(Tenure(session_id, fence, self._clock, self._limits.lease_s))

    @property
    def running(self) -> int:
        """The number of sessions that this process holds, including sessions that it is ending."""
        return len(self._tenures)

    @property
    def turns(self) -> int:
        """The number of running turns."""
        with self._lock:
            return sum(1 for tenure in self._tenures.values() if tenure.running is not None)

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
            tenures = list(self._tenures.values())
        for tenure in tenures:
            tenure.lose()
        rows = self._database.run(leave_queries.RELEASE_ALL, all_fenced(tenures), urgent=True) if tenures else ()
        return [(row.session_id, State(row.state)) for row in rows]

    def stop_turns(self) -> int:
        """Stop the running turns at their next safe point; returns their number.

        Does not stop the ending of a session.
        """
        with self._lock:
            tenures = [tenure for tenure in self._tenures.values() if tenure.running is not None]
        for tenure in tenures:
            tenure.begin_shutdown()
        return len(tenures)

    def begin_shutdown(self) -> None:
        """Stop every turn at its next safe point, including turns that begin after this call."""
        with self._lock:
            self._shutting_down = True
            tenures = list(self._tenures.values())
        for tenure in tenures:
            tenure.begin_shutdown()

    def beat(self) -> None:
        """Run one round: abort overdue model calls, renew leases, and stop turns that must not continue.

        A turn must not continue if it is cancelled or if its lease is lost.
        """
        with self._lock:
            tenures = list(self._tenures.values())
        for tenure in tenures:
            tenure.expire_overdue()
        if not tenures:
            self._renewed_at = self._clock.monotonic()
            return
        asked_at = self._clock.monotonic()
        if asked_at - self._renewed_at >= self._limits.heartbeat_s - _WATCH_S / 2:
            alive = [tenure for tenure in tenures if tenure.within_step()]
            given = {**all_fenced(alive), "lease_s": self._limits.lease_s}
            renewed = {row.session_id for row in self._database.run(queries.RENEW, given, urgent=True)}
            for tenure in alive:
                if tenure.session_id in renewed:
                    tenure.renewed(asked_at)
            if len(renewed) == len(alive):
                self._renewed_at = asked_at  # otherwise some rows were locked: the next beat renews them
        self._watch([tenure for tenure in tenures if tenure.running is not None])

    def _run(self) -> None:
        pause = min(_WATCH_S, self._limits.heartbeat_s / 2)
        while not self._closed.wait(pause):
            try:
                self.beat()
            except Unavailable as error:
                log.warning("leases could not be renewed; the next beat tries again: %s", loggable(error))
            except Exception:
                log.exception("the keeper raised an error and continues")

    def _watch(self, running: list[Tenure]) -> None:
        given = {
            "session_ids": [tenure.session_id for tenure in running],
            "turn_ids": [tenure.running for tenure in running],
        }
        seen = {row.session_id: row for row in self._database.run(queries.WATCH, given, urgent=True)}
        for tenure in running:
            row = seen.get(tenure.session_id)
            if row is None or Fence(row.token, row.nonce) != tenure.fence:
                tenure.lose()
            elif row.cancelled:
                tenure.cancel(row.turn_id)
