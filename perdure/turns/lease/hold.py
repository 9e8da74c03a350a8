"""`Hold`: what a running turn knows of its lease. Shared with the keeper's thread."""

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
        """Begin the session's next turn, which is not cancelled."""
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
        """The process shuts down: abort a model call, await tool calls."""
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
