"""`Hold`: the state of one session's lease in this process. Shared with the keeper's thread."""

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
    """One session's lease, and the model call that runs under it."""

    def __init__(self, claim: Claimed, clock: Clock, lease_s: float) -> None:
        self.session_id = claim.session_id
        self.fence = claim.fence
        self.turn_id: UUID | None = None
        self.tick = claim.kept.tick
        """The session's tick at the last commit known to this process."""
        self.stopping = threading.Event()
        """Set when the turn is cancelled, the lease is lost, or the process drains: a wait for a model ends."""
        self.unwanted = threading.Event()
        """Set when the turn is cancelled or the lease is lost: results of its tools are not needed."""
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
        """The fence's token; claims are ordered by it."""
        return self.fence.token

    @property
    def held(self) -> dict[str, Any]:
        """The parameters of a statement that is conditional on this fence."""
        return self.fence.on(self.session_id)

    def renewed(self, asked_at: float) -> None:
        """Record that the database renewed the lease, by a statement sent at `asked_at` (monotonic)."""
        self._valid_until = asked_at + self._lease_s

    def still_valid(self) -> bool:
        """Whether the lease certainly holds, by this process's monotonic clock."""
        return not self.lost and self._clock.monotonic() < self._valid_until

    def step_within(self, seconds: float) -> None:
        """Declare that the step that begins now ends within `seconds`; after that, its lease is not renewed."""
        self._step_until = self._clock.monotonic() + seconds + GRACE_S

    def within_step(self) -> bool:
        """Whether the current step is within its declared time."""
        return self._clock.monotonic() < self._step_until

    def begin(self, turn_id: UUID) -> None:
        """Begin the session's next turn, and forget a cancellation of the previous one."""
        with self._lock:
            self.turn_id = turn_id
            self.cancelled = False
            if not (self.lost or self.draining):
                self.stopping.clear()
            if not self.lost:
                self.unwanted.clear()

    @contextmanager
    def calling(self, call: ModelCall) -> Iterator[None]:
        """Within the block, `call` is ended when the turn is cancelled, lost, drained or out of time."""
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

    # The reason and the event are set under one lock. Between them `begin` could start the next turn, which would then
    # find itself stopped without a reason.

    def cancel(self, turn_id: UUID) -> None:
        """Record that cancelling `turn_id` was requested."""
        with self._lock:
            if turn_id != self.turn_id:
                return
            self.cancelled = True
            self.unwanted.set()
            call = self._stop()
        _end(call)

    def lose(self) -> None:
        """Record that another worker has claimed the session."""
        with self._lock:
            self.lost = True
            self.unwanted.set()
            call = self._stop()
        _end(call)

    def drain(self) -> None:
        """Record that the process shuts down: model calls are aborted, tool calls awaited."""
        with self._lock:
            self.draining = True
            call = self._stop()
        _end(call)

    def expire_overdue(self) -> None:
        """End the model call, or its current part, if its deadline has passed."""
        with self._lock:
            call = self._call
        if call is not None:
            call.expire_overdue()

    def _stop(self) -> ModelCall | None:
        self.stopping.set()
        return self._call


def _end(call: ModelCall | None) -> None:
    """End a call outside the lock, because this runs a model's own code."""
    if call is not None:
        call.abort()


def _all_held(holds: Sequence[Hold]) -> dict[str, Any]:
    """The parameters of a statement that is conditional on the fences of several sessions."""
    return {
        "session_ids": [hold.session_id for hold in holds],
        "tokens": [hold.fence.token for hold in holds],
        "nonces": [hold.fence.nonce for hold in holds],
    }
