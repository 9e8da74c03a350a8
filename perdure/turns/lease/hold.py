"""`Hold`: a running turn's lease, deadline and reasons to stop, shared between its thread and the keeper's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from perdure.clock import Clock
from perdure.models.protocol import ModelCall
from perdure.turns.lease.claim import Claimed

GRACE_S = 5.0
"""Seconds that a step may run past its deadline before its lease is no longer renewed."""


class Hold:
    """The lease of a claimed session, for the turn that runs under it."""

    def __init__(self, claim: Claimed, clock: Clock, lease_s: float) -> None:
        self.session_id = claim.session_id
        self.fence = claim.fence
        self.turn_id: UUID | None = None
        self.tick = claim.kept.tick
        """The session's tick after the last commit that this process knows of."""
        self.stopping = threading.Event()
        """Set when the turn must stop waiting for a model: cancelled, lease lost, or process draining."""
        self.unwanted = threading.Event()
        """Set when tool results are no longer needed: the turn is cancelled or the lease is lost."""
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
        """The fence's token; a later claim has a higher one."""
        return self.fence.token

    @property
    def held(self) -> dict[str, Any]:
        """The parameters of a statement that is conditional on the fence."""
        return self.fence.on(self.session_id)

    def renewed(self, asked_at: float) -> None:
        """Record that a statement sent at `asked_at` (monotonic) renewed the lease."""
        self._valid_until = asked_at + self._lease_s

    def still_valid(self) -> bool:
        """Whether the lease is certainly unexpired, by this process's monotonic clock."""
        return not self.lost and self._clock.monotonic() < self._valid_until

    def step_within(self, seconds: float) -> None:
        """Set the deadline of the step that begins now; the keeper does not renew the lease after the deadline."""
        self._step_until = self._clock.monotonic() + seconds + GRACE_S

    def within_step(self) -> bool:
        """Whether the present step is within its deadline."""
        return self._clock.monotonic() < self._step_until

    def begin(self, turn_id: UUID) -> None:
        """Begin the session's next turn: clears the cancellation of the previous one."""
        with self._lock:
            self.turn_id = turn_id
            self.cancelled = False
            if not (self.lost or self.draining):
                self.stopping.clear()
            if not self.lost:
                self.unwanted.clear()

    @contextmanager
    def calling(self, call: ModelCall) -> Iterator[None]:
        """Within the block, abort `call` if the turn is cancelled, drained or out of time, or if the lease is lost."""
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

    # Each method below sets the reason and stops the turn under one lock. Without it, `begin` could start the next turn
    # in between, which would then be stopped without a reason.

    def cancel(self, turn_id: UUID) -> None:
        """Stop the running turn as cancelled, if it is the turn `turn_id`."""
        with self._lock:
            if turn_id != self.turn_id:
                return
            self.cancelled = True
            self.unwanted.set()
            call = self._stop()
        _abort(call)

    def lose(self) -> None:
        """Stop the turn because another claim has raised the fence."""
        with self._lock:
            self.lost = True
            self.unwanted.set()
            call = self._stop()
        _abort(call)

    def drain(self) -> None:
        """Stop the turn at its next safe point: a model call is aborted, tool calls are awaited."""
        with self._lock:
            self.draining = True
            call = self._stop()
        _abort(call)

    def expire_overdue(self) -> None:
        """Abort the model call if it is overdue. If only its present attempt is overdue, abort that attempt."""
        with self._lock:
            call = self._call
        if call is not None:
            call.expire_overdue()

    def _stop(self) -> ModelCall | None:
        self.stopping.set()
        return self._call


def _abort(call: ModelCall | None) -> None:
    """Abort the call. The caller must not hold the lock, because `abort` runs the model's own code."""
    if call is not None:
        call.abort()


def all_held(holds: Sequence[Hold]) -> dict[str, Any]:
    """The parameters of a statement that is conditional on the fences of several sessions."""
    return {
        "session_ids": [hold.session_id for hold in holds],
        "tokens": [hold.fence.token for hold in holds],
        "nonces": [hold.fence.nonce for hold in holds],
    }
