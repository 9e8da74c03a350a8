"""The lease on a session: claimed, kept, watched, lost.

Keeps the law that a session has one runner and that a stale one cannot write: a claim
raises the fence (`perdure.database.fencing`), and every commit is conditional on it. `Keeper` is one thread a
process: it renews all leases in one statement, but only of turns that are within their
step's own deadline; it learns what was cancelled or taken away; and it hangs up on model
calls whose time has passed. `Hold` is what a running turn knows of its lease.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.models.protocol import ModelCall
from perdure.sessions.states import State
from perdure.settings import TurnSettings
from perdure.snapshots.store import Version
from perdure.turns.lease import queries

log = logging.getLogger(__name__)

ISOLATE_FROM_CLAIM = 2
"""Claims of one turn after which it runs in a process of its own, whatever it got done in them."""

GRACE_S = 5.0
"""Seconds that a step may run past its deadline before its lease is no longer renewed."""

_WATCH_S = 1.0
_NO_LIMIT = 2**31 - 1
_MOST_TOUCHED = 10_000
"""Sessions that a process knows to have worked on, for its last flush."""


@dataclass(frozen=True, slots=True)
class Before:
    """What came before a turn: the channel of the turn before, the session before and its summary, if any."""

    channel: str | None = None
    session_id: UUID | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class TurnRef:
    """The turn that a claim began or took over."""

    turn_id: UUID
    seq: int
    user_id: str
    agent: str
    channel: str
    first_seq: int
    cancel_requested_at: datetime | None
    before: Before = Before()
    held: str | None = None
    """How it ends, as JSON, once the session's snapshot is saved; None while it has not come to that."""
    started_at: datetime | None = None
    language: str | None = None
    """As the message's metadata name it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a session keeps between its turns: its tick, its working variables, which snapshot of it counts.

    `variables` is JSON: those of `variables_tick`, which is None if there are none. It is None as well where
    the claim could not see them yet. `wakes` is how often the session was woken in vain before.
    """

    tick: int = 0
    variables_tick: int | None = None
    variables: str | None = None
    saved: Version | None = None
    wakes: int = 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """The session is held under `fence`. `turn` is None if a concurrent commit took the last one."""

    session_id: UUID
    fence: Fence
    strikes: int
    spent_s: float
    turn: TurnRef | None
    kept: Kept = Kept()

    @property
    def token(self) -> int:
        """The fence's token, by which claims are ordered."""
        return self.fence.token


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """Somebody else runs the session, or it has nothing to run."""


@dataclass(frozen=True, slots=True)
class NeedsIsolation:
    """The turn has cost processes their lives: it must be claimed by one of its own."""

    claims: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The user runs as many turns as one user may: the session waits for one of them to settle."""


Claim = Claimed | NotNeeded | NeedsIsolation | Queued


class LeaseLost(Exception):
    """The session is somebody else's now: stop, and write nothing."""


class Hold:
    """One running turn's lease, shared with the keeper. `call` is the model call under way."""

    def __init__(self, claim: Claimed, clock: Clock, lease_s: float) -> None:
        self.session_id = claim.session_id
        self.fence = claim.fence
        self.turn_id: UUID | None = None
        self.tick = claim.kept.tick
        """The session's tick by the last commit that this process knows of."""
        self.stopping = threading.Event()
        """Something other than time ends the wait for a model: cancelled, lost or draining."""
        self.unwanted = threading.Event()
        """The turn no longer wants its tools' results: cancelled or lost."""
        self.cancelled = False
        self.lost = False
        self.draining = False
        self._clock = clock
        self._lease_s = lease_s
        self._call: ModelCall | None = None
        self._lock = threading.Lock()
        self._valid_until = clock.monotonic() + lease_s
        self._step_until = self._valid_until

    @property
    def token(self) -> int:
        """The fence's token, by which claims are ordered."""
        return self.fence.token

    @property
    def held(self) -> dict[str, Any]:
        """The parameters of a statement that is conditional on the fence."""
        return self.fence.on(self.session_id)

    def renewed(self, asked_at: float) -> None:
        """The database renewed the lease in answer to a statement sent at `asked_at` (monotonic)."""
        self._valid_until = asked_at + self._lease_s

    def still_valid(self) -> bool:
        """Whether the lease holds for certain, by this process's own stopwatch."""
        return not self.lost and self._clock.monotonic() < self._valid_until

    def step_within(self, seconds: float) -> None:
        """The step that begins now ends within `seconds`; later, its lease is not renewed."""
        self._step_until = self._clock.monotonic() + seconds + GRACE_S

    def within_step(self) -> bool:
        """Whether the present step may still be running honestly."""
        return self._clock.monotonic() < self._step_until

    def begin(self, turn_id: UUID) -> None:
        """Go on to the session's next turn, which nobody has cancelled yet."""
        with self._lock:
            self.turn_id = turn_id
            self.cancelled = False
            if not (self.lost or self.draining):
                self.stopping.clear()
            if not self.lost:
                self.unwanted.clear()

    @contextmanager
    def calling(self, call: ModelCall) -> Iterator[None]:
        """Have `call` ended when the turn is cancelled, lost, drained, or out of time."""
        with self._lock:
            self._call = call
            already = self.stopping.is_set()
        if already:
            call.abort()
        try:
            yield
        finally:
            with self._lock:
                self._call = None

    # Each of these says why and stops under one lock: between the two, `begin` could go on to
    # the next turn, which would then find itself stopped and never learn the reason.

    def cancel(self, turn_id: UUID) -> None:
        """Somebody asked for `turn_id` to be cancelled."""
        with self._lock:
            if turn_id != self.turn_id:
                return
            self.cancelled = True
            self.unwanted.set()
            call = self._stop()
        _end(call)

    def lose(self) -> None:
        """The token has moved on."""
        with self._lock:
            self.lost = True
            self.unwanted.set()
            call = self._stop()
        _end(call)

    def drain(self) -> None:
        """The process shuts down: a model call is given up, a tool call is awaited."""
        with self._lock:
            self.draining = True
            call = self._stop()
        _end(call)

    def expire_overdue(self) -> None:
        """Hang up on the model call, or on the part of it that is under way, if its deadline has passed."""
        with self._lock:
            call = self._call
        if call is not None:
            call.expire_overdue()

    def _stop(self) -> ModelCall | None:
        self.stopping.set()
        return self._call


def _end(call: ModelCall | None) -> None:
    """Hang up, outside of the lock: a model's own code runs there."""
    if call is not None:
        call.abort()


def _all_held(holds: Sequence[Hold]) -> dict[str, Any]:
    """The parameters of a statement that is conditional on the fences of several sessions."""
    return {
        "session_ids": [hold.session_id for hold in holds],
        "tokens": [hold.fence.token for hold in holds],
        "nonces": [hold.fence.nonce for hold in holds],
    }


class Keeper:
    """Keeps the leases of all turns that this process runs. One thread; start it once."""

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
        self._forgets = False

    def start(self) -> None:
        """Begin to keep."""
        self._thread.start()

    def close(self) -> None:
        """Stop keeping; what is still held runs out."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_WATCH_S * 5)

    @contextmanager
    def holding(self, claim: Claimed) -> Iterator[Hold]:
        """Keep the lease of `claim` within the block."""
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
        """How many sessions this process holds: to run their turns, or to end them."""
        return len(self._holds)

    @property
    def turns(self) -> int:
        """How many turns this process runs."""
        with self._lock:
            return sum(1 for hold in self._holds.values() if hold.turn_id is not None)

    def touched(self) -> list[tuple[UUID, Fence]]:
        """The sessions that this process held, the latest first, each with its last fence here; bounded."""
        with self._lock:
            return [*reversed(self._touched.items())]

    def release_all(self) -> list[tuple[UUID, State]]:
        """Give back every lease, for a process that must leave in mid-turn; the sessions, and where they stand."""
        with self._lock:
            holds = list(self._holds.values())
        for hold in holds:
            hold.lose()
        rows = self._database.run(queries.RELEASE_ALL, _all_held(holds), urgent=True) if holds else ()
        return [(row.session_id, State(row.state)) for row in rows]

    def park(self) -> int:
        """Have the turns that run now given up at their next safe point, and no ending of a session; how many."""
        with self._lock:
            holds = [hold for hold in self._holds.values() if hold.turn_id is not None]
        for hold in holds:
            hold.drain()
        return len(holds)

    def drain(self) -> None:
        """Have every turn given up at its next safe point, those that begin from now on as well."""
        with self._lock:
            self._draining = True
            holds = list(self._holds.values())
        for hold in holds:
            hold.drain()

    def beat(self) -> None:
        """One round: time out calls, renew what is due, learn what was cancelled or lost."""
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
        if not self._forgets:
            self._forgets = True
            log.warning(
                "more than %d sessions were worked on here: the oldest are not flushed at the end", _MOST_TOUCHED
            )

    def _run(self) -> None:
        pause = min(_WATCH_S, self._limits.heartbeat_s / 2)
        while not self._closed.wait(pause):
            try:
                self.beat()
            except Unavailable as error:
                log.warning("leases could not be renewed: %s", error)
            except Exception:
                log.exception("the keeper met an error and goes on")

    def _renew(self, holds: list[Hold]) -> None:
        asked_at = self._clock.monotonic()
        rows = self._database.run(
            queries.RENEW,
            {**_all_held(holds), "lease_s": self._limits.lease_s},
            urgent=True,
        )
        renewed = {row.session_id for row in rows}
        for hold in holds:
            if hold.session_id in renewed:
                hold.renewed(asked_at)
        if len(renewed) == len(holds):
            self._renewed_at = asked_at  # else the rows that were locked are renewed at the next beat

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


def claim(database: Database, session_id: UUID, owner: str, limits: TurnSettings, *, alone: bool = False) -> Claim:
    """Take the lease on a session whose lease is free, and begin its oldest unsettled turn.

    `alone` says that this process is the turn's own. A turn out of attempts is claimed by
    whoever comes, for it will only be given up.
    """
    parameters = {
        "session_id": session_id,
        "owner": owner,
        "lease_s": limits.lease_s,
        "user_concurrency": limits.user_concurrency,
        "max_attempts": limits.max_attempts,
    }
    isolate_from = _NO_LIMIT if alone else ISOLATE_FROM_CLAIM
    rows = database.run(queries.CLAIM, {**parameters, "isolate_from": isolate_from})
    if rows and rows[0].free and rows[0].token is None and rows[0].strikes_before >= limits.max_attempts:
        rows = database.run(queries.CLAIM, {**parameters, "isolate_from": _NO_LIMIT})
    if not rows:
        return NotNeeded()
    row = rows[0]
    if not row.free:
        return Queued()
    if row.token is None:
        return NeedsIsolation(row.claims_before)
    fence = Fence(row.token, row.nonce)
    return Claimed(session_id, fence, row.strikes, row.spent_s, _turn(row), _kept(row))


def begin_next(database: Database, session_id: UUID, fence: Fence, limits: TurnSettings) -> Claimed:
    """Begin the oldest unsettled turn of a session that is held under `fence`.

    Raises:
        LeaseLost: another claim has taken the session.
    """
    rows = database.run(queries.BEGIN_NEXT, {**fence.on(session_id), "lease_s": limits.lease_s})
    if not rows:
        raise LeaseLost
    row = rows[0]
    return Claimed(session_id, fence, row.strikes, row.spent_s, _turn(row), _kept(row))


def is_claimable(database: Database, session_id: UUID, limits: TurnSettings) -> bool:
    """Whether a claim that found nothing only met a row that was locked for a moment."""
    rows = database.run(queries.CLAIMABLE, {"session_id": session_id, "lease_s": limits.lease_s})
    return bool(rows and rows[0].claimable)


def _turn(row: Row[Any]) -> TurnRef | None:
    if row.turn_id is None:
        return None
    return TurnRef(
        turn_id=row.turn_id,
        seq=row.seq,
        user_id=row.user_id,
        agent=row.agent,
        channel=row.channel,
        first_seq=row.first_seq,
        cancel_requested_at=row.cancel_requested_at,
        before=Before(row.previous_channel, row.previous_session_id, row.previous_summary),
        held=row.held,
        started_at=row.started_at,
        language=row.language,
    )


def _kept(row: Row[Any]) -> Kept:
    saved = None if row.saved_token is None else Version(row.saved_token, row.saved_tick)
    return Kept(row.tick, row.variables_tick, row.variables, saved, row.wakes_before)
