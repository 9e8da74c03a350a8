"""Parks a turn until a model may answer: if all models are unavailable, and `on_unavailable` is `park`.

The worker releases the session, and sets a time before which no worker claims the session. The wait counts neither as
an attempt nor towards the turn's time limit. The session's later turns wait too.

When the circuit breaker of a model closes in any process, all turns that wait for a model become due. The sweeper
returns a few of them at once to each model, the oldest first, and more while the model answers (see `pace`). While many
turns wait for their return, a newer turn with the same model waits behind them.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from perdure.database.engine import Executor
from perdure.errors import CircuitBreakerOpen, PerdureError
from perdure.resilience.circuit import CircuitState as Breaker
from perdure.resilience.failures import FailureKind, requested_pause_s, verdict
from perdure.resilience.shared import Transition
from perdure.turns.lease import pace, queries
from perdure.turns.lease.tenure import TurnRow

log = logging.getLogger(__name__)

MOST_A_ROUND = pace.FIRST
"""The most parked turns that the sweeper returns at once to a model that has just recovered. If no more of them wait, a
newer turn need not wait behind them."""

LONGEST = timedelta(days=1)
"""How long after its last step a turn is parked. Later, it fails if its models are unavailable."""

_LONGEST_PAUSE_S = 600.0


def pause_s(error: PerdureError, cooldown_s: float) -> float | None:
    """Seconds until a model that failed with `error` may answer; None if the error is not transient."""
    if isinstance(error, CircuitBreakerOpen):
        # While the half-open breaker waits for its probe, `retry_after_s` is the probe's time limit. No process reports
        # that a probe failed or was lost, so wait at most the cooldown.
        wanted = None if error.retry_after_s is None else min(error.retry_after_s, cooldown_s)
    elif verdict(error) is FailureKind.TRANSIENT:
        wanted = max(requested_pause_s(error) or 0.0, cooldown_s)
    else:
        return None
    return min(cooldown_s if wanted is None else wanted, _LONGEST_PAUSE_S)


def may_wait(turn: TurnRow, now: datetime, stepped_at: datetime | None) -> bool:
    """Whether the turn may be parked. `stepped_at` is the time of its last step; `None`: it has no step."""
    since = stepped_at or turn.started_at
    return since is None or now - since < LONGEST


def overtakes(executor: Executor, turn: TurnRow, model: str) -> bool:
    """Whether the turn would overtake turns that wait for their return to `model`, so that it must wait behind them."""
    if not turn.may_overtake:
        return False
    return bool(executor.run(queries.OVERTAKES, {"model": model, "most": MOST_A_ROUND})[0].overtakes)


def recall(executor: Executor, change: Transition) -> None:
    """Make parked turns due if `change` closes the breaker of a model. Called at each transition of any breaker."""
    if change.after is not Breaker.CLOSED or not change.name.startswith("llm:"):
        return
    found = executor.run(queries.RECALL, {})
    if found:
        log.info("breaker %s is closed: %d parked turns are due", change.name, len(found))
