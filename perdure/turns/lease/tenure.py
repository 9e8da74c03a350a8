"""`Tenure`: what a process has while it holds a session.

That is the fence, the turn at hand, and the state that is kept between turns. `claim` makes a tenure, and `read_again`
brings it up to date. Only code that reads or writes under the fence gets the tenure. Code inside a step, such as a
hook or a tool call, gets its base class, the `TurnScope`: the step's deadline and the reasons to stop. The thread of
the turn and the thread of the keeper share both.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID
from weakref import WeakSet
from zoneinfo import ZoneInfo

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.fencing import Fence
from perdure.errors import SettingsError, loggable
from perdure.models.protocol import ModelCall
from perdure.snapshots.store import Version
from perdure.text.untrusted import load_object
from perdure.text.zones import find_zone
from perdure.turns.additions import NO_ADDITIONS, Additions

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""The keeper stops renewing a lease this number of seconds after the deadline of the turn's step."""


class LeaseLost(Exception):
    """Another worker has the session: the caller must stop and write nothing."""


@dataclass(frozen=True, slots=True)
class Before:
    """The previous turn's channel, and the id and summary of the user's previous session, if any."""

    channel: str | None = None
    session_id: UUID | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class TurnRow:
    """What the database has of the turn at hand. `user_id` is the key of its user."""

    turn_id: UUID
    session_id: UUID
    seq: int
    user_id: UserKey
    agent: str
    channel: str
    first_seq: int
    cancel_requested_at: datetime | None = None
    before: Before = Before()
    verdict: str | None = None
    """The verdict, as JSON, of a turn that has ended but is not settled until its snapshot is saved."""
    started_at: datetime | None = None
    attempt_error: str | None = None
    """The error of the last failed attempt."""
    may_overtake: bool = False
    """Whether other turns may wait for this turn's model."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The message's metadata. A message that joins the turn adds its own."""
    additions: Additions = NO_ADDITIONS
    """What the turn's client adds to the agent."""
    traceparent: str | None = None
    """The span of the turn's accept, if its accept was traced."""

    @property
    def answers_call(self) -> bool:
        """Whether the turn answers a call of another agent: its session, which no user sees, has the turn's id."""
        return self.turn_id == self.session_id

    @property
    def language(self) -> str | None:
        """The language in the message's metadata."""
        found = self.metadata.get("language")
        return found if isinstance(found, str) else None

    @classmethod
    def begun(cls, session_id: UUID, row: Row[Any]) -> TurnRow:
        """The turn of a row that has the columns of the statement `turns.begun`."""
        return cls(row.turn_id, session_id, row.seq, UserKey(row.user_id), row.agent, row.channel, row.first_seq)

    @classmethod
    def read(cls, session_id: UUID, row: Row[Any]) -> TurnRow | None:
        """The turn of a row of the statement `turns.claim` or `turns.begin_next`; `None` if no turn has begun.

        The metadata and the additions are empty if this release cannot parse them.
        """
        if row.turn_id is None:
            return None
        metadata: dict[str, Any] = {}
        try:
            metadata = {} if row.metadata is None else load_object(row.metadata)
        except ValueError as error:
            log.warning("turn %s runs without its metadata, which cannot be parsed: %s", row.turn_id, loggable(error))
        additions = NO_ADDITIONS
        try:
            additions = Additions.from_dict(None if row.additions is None else load_object(row.additions))
        except (ValueError, TypeError, LookupError, SettingsError) as error:
            log.error("turn %s runs without what its client adds: %s", row.turn_id, loggable(error))  # noqa: TRY400
        return cls(
            turn_id=row.turn_id,
            session_id=session_id,
            seq=row.seq,
            user_id=UserKey(row.user_id),
            agent=row.agent,
            channel=row.channel,
            first_seq=row.first_seq,
            cancel_requested_at=row.cancel_requested_at,
            before=Before(row.previous_channel, row.previous_session_id, row.previous_summary),
            verdict=row.unsaved,
            started_at=row.started_at,
            attempt_error=row.attempt_error,
            metadata=metadata,
            additions=additions,
            traceparent=row.traceparent,
            may_overtake=getattr(row, "may_overtake", False),
        )

    def zone(self, default: str) -> ZoneInfo:
        """The user's time zone: that of the message's metadata, or `default`."""
        return find_zone(self.metadata.get("timezone")) or ZoneInfo(default)

    def own_metadata(self) -> dict[str, Any]:
        """A copy of the metadata for a function of the agent, which may change it."""
        return copy.deepcopy(dict(self.metadata))


class TurnScope:
    """The running of a turn: its run time, the deadline of its present step, and the reasons to stop.

    Attributes:
        running: The id of the turn that runs.
        stopping: Set by `cancel`, `lose` and `begin_shutdown`: the turn must stop at its next safe point.
        unwanted: Set when tool results are no longer needed: the turn is cancelled or the lease is lost.
        cancelled: The turn is cancelled.
        lost: Another claim has raised the session's fence.
        shutting_down: The process takes no more steps.
        deps: What the agent's function `deps` made for this run of the turn.
        reserved: The amounts to which this run may last have set what the turn costs (`perdure.turns.budgets`).
        report: Tells those who follow the turn the progress of a call: its id, its tool and a text.
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self.lease_s = lease_s
        self.running: UUID | None = None
        self.stopping = threading.Event()
        self.unwanted = threading.Event()
        self.cancelled = False
        self.lost = False
        self.shutting_down = False
        self.deps: Any = None
        self.reserved: list[Decimal] = []
        self.report: Callable[[str, str, str], None] | None = None
        self._clock = clock
        self._began = clock.monotonic()
        self._call: ModelCall | None = None
        self._unwanted_calls: WeakSet[threading.Event] = WeakSet()
        self._lock = threading.Lock()
        self._valid_until = clock.monotonic() + lease_s
        self._step_until = self._valid_until

    @property
    def spent_s(self) -> float:
        """The run time in seconds of the turn at hand, over all workers that ran it."""
        return self._clock.monotonic() - self._began

    def spent(self, seconds: float) -> None:
        """The turn at hand had run for this number of seconds before now."""
        self._began = self._clock.monotonic() - seconds

    def renewed(self, asked_at: float) -> None:
        """Record that a statement sent at the monotonic time `asked_at` renewed the lease."""
        self._valid_until = asked_at + self.lease_s

    def still_valid(self) -> bool:
        """Whether the lease is not lost and, by this process's monotonic clock, has not expired."""
        return not self.lost and self._clock.monotonic() < self._valid_until

    def step_within(self, seconds: float) -> None:
        """Set the deadline of the step that begins now to `seconds` from now.

        The keeper stops renewing the lease `GRACE_S` seconds after the deadline.
        """
        self._step_until = self._clock.monotonic() + seconds + GRACE_S

    def within_step(self) -> bool:
        """Whether the present step is within its deadline, extended by `GRACE_S`."""
        return self._clock.monotonic() < self._step_until

    def unwanted_call(self) -> threading.Event:
        """An event for a tool call, which `cancel` and `lose` set. A later turn does not clear it, unlike `unwanted`.

        The thread of a call may outlast the turn.
        """
        event = threading.Event()
        with self._lock:
            self._unwanted_calls.add(event)
            if self.unwanted.is_set():
                event.set()
        return event

    @contextmanager
    def calling(self, call: ModelCall) -> Iterator[None]:
        """Within the block, let `cancel`, `lose`, `begin_shutdown` and `expire_overdue` abort `call`."""
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

    # `cancel`, `lose` and `begin_shutdown` each set a reason and stop the turn while they hold the lock. Without the
    # lock, `begin` could start the next turn between these two actions. It would then be stopped without a reason.

    def cancel(self, turn_id: UUID) -> None:
        """Stop the turn `turn_id` as cancelled, if the turn is running."""
        with self._lock:
            if turn_id != self.running:
                return
            self.cancelled = True
            self._set_unwanted()
            call = self._stop()
        _abort(call)

    def lose(self) -> None:
        """Stop the turn because another claim has raised the fence."""
        with self._lock:
            self.lost = True
            self._set_unwanted()
            call = self._stop()
        _abort(call)

    def begin_shutdown(self) -> None:
        """Stop the turn at its next safe point: abort a model call, but wait for the end of tool calls."""
        with self._lock:
            self.shutting_down = True
            call = self._stop()
        _abort(call)

    def expire_overdue(self) -> None:
        """Abort the model call if it is overdue. If only its present attempt is overdue, abort that attempt."""
        with self._lock:
            call = self._call
        if call is not None:
            call.expire_overdue()

    def _set_unwanted(self) -> None:
        for each in (self.unwanted, *self._unwanted_calls):
            each.set()

    def _stop(self) -> ModelCall | None:
        self.stopping.set()
        return self._call


def _abort(call: ModelCall | None) -> None:
    """Abort the call. The caller must not hold the tenure's lock, because `abort` runs the model's own code."""
    if call is not None:
        call.abort()


class Tenure(TurnScope):
    """A session that this process holds under `fence`.

    Attributes:
        turn: The turn at hand, or `None`: a concurrent commit settled the last turn, or no turn may begin because the
            intake is closed.
        tick: The number of the session's committed steps, after the last commit that this process has made or read.
        strikes: The number of attempts at the turn's next step, the present one included.
        wakes: The number of wake-ups before this claim.
        overdue: The turn has waited long enough for a worker that has its agent and tools: it fails if this worker
            lacks them.
        variables_tick: The tick at which the working variables were last changed. `None`: there are no variables.
        variables: The working variables, as JSON. `None`: there are no variables, or a concurrent transaction committed
            them too late for the claim's statement to see them.
        saved: The version of the session's valid snapshot.
        alone: This process runs only this session.
    """

    def __init__(
        self,
        session_id: UUID,
        fence: Fence,
        clock: Clock,
        lease_s: float,
        *,
        turn: TurnRow | None = None,
        tick: int = 0,
    ) -> None:
        super().__init__(clock, lease_s)
        self.session_id = session_id
        self.fence = fence
        self.turn = turn
        self.tick = tick
        self.strikes = 0
        self.wakes = 0
        self.overdue = False
        self.variables_tick: int | None = None
        self.variables: str | None = None
        self.saved: Version | None = None
        self.alone = False

    @classmethod
    def claimed(cls, session_id: UUID, row: Row[Any], clock: Clock, lease_s: float) -> Tenure:
        """The tenure of a row of the statement `turns.claim`."""
        tenure = cls(session_id, Fence(row.token, row.nonce), clock, lease_s)
        tenure.read(row)
        return tenure

    @property
    def token(self) -> int:
        """The fence's token. A later claim of the session has a higher token."""
        return self.fence.token

    @property
    def fenced(self) -> dict[str, Any]:
        """The parameters of a statement that is conditional on the fence."""
        return self.fence.on(self.session_id)

    @property
    def at_hand(self) -> TurnRow:
        """The turn at hand.

        Raises:
            LookupError: there is none.
        """
        if self.turn is None:
            raise LookupError(f"session {self.session_id} has no turn to run")
        return self.turn

    def read(self, row: Row[Any]) -> None:
        """Bring the tenure up to date with a row of the statement `turns.claim` or `turns.begin_next`."""
        before, self.turn = self.turn, TurnRow.read(self.session_id, row)
        if before is None or self.turn is None or self.turn.turn_id != before.turn_id:
            self.spent(row.spent_s)
            self.overdue = False
        self.strikes, self.wakes, self.tick = row.strikes, row.wakes_before, row.tick
        self.variables_tick, self.variables = row.variables_tick, row.variables
        self.saved = None if row.saved_token is None else Version(row.saved_token, row.saved_tick)

    def begin(self) -> None:
        """Begin to run the turn at hand, and clear the cancellation of the previous turn."""
        with self._lock:
            self.running = self.at_hand.turn_id
            self.cancelled = False
            self.deps = self.report = None
            self.reserved = []
            if not (self.lost or self.shutting_down):
                self.stopping.clear()
            if not self.lost:
                self.unwanted.clear()
            self._unwanted_calls = WeakSet()


def all_fenced(tenures: Sequence[Tenure]) -> dict[str, Any]:
    """The parameters of a statement that is conditional on the fences of several sessions."""
    return {
        "session_ids": [tenure.session_id for tenure in tenures],
        "tokens": [tenure.fence.token for tenure in tenures],
        "nonces": [tenure.fence.nonce for tenure in tenures],
    }
