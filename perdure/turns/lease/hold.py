"""`Hold`: a running turn's lease, its step deadline and its reason to stop.

The thread of the turn and the thread of the keeper share a `Hold`.
"""

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
"""The keeper stops renewing a lease this number of seconds after the deadline of the turn's step."""


class Hold:
    """The lease of a claimed session, and the state of the turn that runs under the lease."""

    def __init__(self, claim: Claimed, clock: Clock, lease_s: float) -> None:
        self.session_id = claim.session_id
        self.fence = claim.fence
        self.turn_id: UUID | None = None
        self.tick = claim.kept.tick
        """The session's tick after the last commit that this process has made or read."""
        self.stopping = threading.Event()
        """Set by `cancel`, `lose` and `drain`: the turn must stop at its next safe point."""
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
        """The fence's token. A later claim of the session has a higher token."""
        return self.fence.token

    @property
    def held(self) -> dict[str, Any]:
        """The parameters of a statement that is conditional on the fence."""
        return self.fence.on(self.session_id)

    def renewed(self, asked_at: float) -> None:
        """Record that a statement sent at the monotonic time `asked_at` renewed the lease."""
        self._valid_until = asked_at + self._lease_s

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

    def begin(self, turn_id: UUID) -> None:
        """Begin the session's next turn, and clear the cancellation of the previous turn."""
        with self._lock:
            self.turn_id = turn_id
            self.cancelled = False
            if not (self.lost or self.draining):
                self.stopping.clear()
            if not self.lost:
                self.unwanted.clear()

    @contextmanager
    def calling(self, call: ModelCall) -> Iterator[None]:
        """Within the block, let `cancel`, `lose`, `drain` and `expire_overdue` abort `call`."""
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

    # `cancel`, `lose` and `drain` each set a reason and stop the turn while they hold the lock. Without the lock,
    # `begin` could start the next turn between these two actions. The next turn would then be stopped without a reason.

    def cancel(self, turn_id: UUID) -> None:
        """Stop the turn `turn_id` as cancelled, if the turn is running."""
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
        """Stop the turn at its next safe point: abort a model call, but wait for the end of tool calls."""
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
    """Abort the call. The caller must not hold the `Hold`'s lock, because `abort` runs the model's own code."""
    if call is not None:
        call.abort()


def all_held(holds: Sequence[Hold]) -> dict[str, Any]:
    """The parameters of a statement that is conditional on the fences of several sessions."""
    return {
        "session_ids": [hold.session_id for hold in holds],
        "tokens": [hold.fence.token for hold in holds],
        "nonces": [hold.fence.nonce for hold in holds],
    }
