"""Parking: a turn whose models are all unavailable waits, if `on_unavailable` is `park`.

The turn is released with a time before which no worker claims its session. It uses up neither attempts nor its time
limit, and the session's other turns wait behind it. When a breaker closes, in whichever process, parked turns become
due. The sweeper wakes a few per round, the oldest first, so that a recovered model is not overloaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta

from perdure.clock import Clock
from perdure.database.engine import Executor
from perdure.errors import CircuitBreakerOpen, PerdureError
from perdure.resilience.circuit import State as Breaker
from perdure.resilience.failures import Verdict, asked_pause_s, verdict
from perdure.resilience.shared import Transition
from perdure.turns.lease import queries
from perdure.turns.lease.claim import LeaseLost, TurnRef
from perdure.turns.lease.hold import Hold

log = logging.getLogger(__name__)

MOST_A_ROUND = 10
"""The most parked turns that one round of the sweeper wakes."""

LONGEST = timedelta(days=1)
"""The longest that a turn may be parked, in seconds since its beginning; then it fails."""

_LONGEST_PAUSE_S = 600.0


def pause_s(error: PerdureError, cooldown_s: float) -> float | None:
    """Seconds after which the failed model may be available; `None` if waiting does not help."""
    if isinstance(error, CircuitBreakerOpen):
        # The probe's deadline. If the probe fails or is lost, no event announces it.
        wanted = None if error.retry_after_s is None else min(error.retry_after_s, cooldown_s)
    elif verdict(error) is Verdict.PASSING:
        wanted = max(asked_pause_s(error) or 0.0, cooldown_s)
    else:
        return None
    return min(cooldown_s if wanted is None else wanted, _LONGEST_PAUSE_S)


def may_wait(turn: TurnRef, clock: Clock) -> bool:
    """Whether the turn has been parked for less than the limit."""
    return turn.started_at is None or clock.now() - turn.started_at < LONGEST


@dataclass(frozen=True, slots=True)
class Delayed:
    """No model is available and the turn waits `wait_s` seconds.

    `steps`: the steps that it has taken; `spent_s`: its time under lease without the failed call.
    """

    error: PerdureError
    wait_s: float
    spent_s: float
    steps: int


def park(executor: Executor, hold: Hold, turn: TurnRef, delayed: Delayed) -> bool:
    """Release a turn until a model may be available; returns whether a cancel arrived, so that it is claimed at once.

    Raises:
        LeaseLost: the token has moved on; nothing was written.
    """
    rows = executor.run(
        queries.PARK_FOR,
        {
            **hold.held,
            "turn_id": turn.turn_id,
            "error_code": delayed.error.code,
            "steps": delayed.steps,
            "wait_s": delayed.wait_s,
            "spent_s": delayed.spent_s,
        },
    )
    if not rows:
        raise LeaseLost
    cancelled = rows[0].cancel_requested_at is not None
    if cancelled:
        executor.run(queries.BRING_BACK, hold.held)
    return cancelled


def recall(executor: Executor, change: Transition) -> None:
    """Make parked turns due if the breaker now admits calls. Called when a model's breaker changes its state."""
    if change.after is not Breaker.CLOSED or not change.name.startswith("llm:"):
        return
    found = executor.run(queries.RECALL, {})
    if found:
        log.info("breaker %s is closed: %d parked turns come back", change.name, len(found))
