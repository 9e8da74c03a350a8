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
from perdure.resilience.failures import Verdict, requested_pause_s, verdict
from perdure.resilience.shared import Transition
from perdure.turns.lease import queries
from perdure.turns.lease.claim import LeaseLost, TurnRef
from perdure.turns.lease.hold import Hold

log = logging.getLogger(__name__)

MOST_A_ROUND = 10
"""Parked turns that one round of the sweeper wakes."""

LONGEST = timedelta(days=1)
"""From its beginning on, a turn is parked so long at the most; what nobody answered by then has failed."""

_LONGEST_PAUSE_S = 600.0


def pause_s(error: PerdureError, cooldown_s: float) -> float | None:
    """Seconds after which a model that failed so may answer; None if waiting is no help."""
    if isinstance(error, CircuitBreakerOpen):
        # While a probe is under way that says when its time is over; should it fail or be lost, nobody tells.
        wanted = None if error.retry_after_s is None else min(error.retry_after_s, cooldown_s)
    elif verdict(error) is Verdict.TRANSIENT:
        wanted = max(requested_pause_s(error) or 0.0, cooldown_s)
    else:
        return None
    return min(cooldown_s if wanted is None else wanted, _LONGEST_PAUSE_S)


def may_wait(turn: TurnRef, clock: Clock) -> bool:
    """Whether a turn has not waited for too long already."""
    return turn.started_at is None or clock.now() - turn.started_at < LONGEST


@dataclass(frozen=True, slots=True)
class Delayed:
    """No model answers, and the turn would rather wait: it goes on after `wait_s` seconds.

    `steps` are those that it has taken; `spent_s` is its time under lease without the call that failed.
    """

    error: PerdureError
    wait_s: float
    spent_s: float
    steps: int


def park(executor: Executor, hold: Hold, turn: TurnRef, delayed: Delayed) -> bool:
    """Give a turn back; whether it was cancelled meanwhile, and is to be claimed at once.

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
    """A model's breaker changed its state: if it lets calls through again, parked turns need not wait longer."""
    if change.after is not Breaker.CLOSED or not change.name.startswith("llm:"):
        return
    found = executor.run(queries.RECALL, {})
    if found:
        log.info("breaker %s is closed: %d parked turns come back", change.name, len(found))
