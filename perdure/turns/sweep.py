"""The sweeper: publishes wake-ups for work that is due and that no worker runs.

Every worker tries to run a round every few seconds. A compare-and-set on a row decides which worker runs the round. So
no lock outlives a statement, and a paused sweeper does not block other workers. A round publishes a bounded number of
wake-ups. The pause between two wake-ups of a session grows until a worker claims the session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from uuid import UUID

from perdure.memory.consolidation import consolidate
from perdure.runtime import Runtime
from perdure.sessions.ending import endings_due
from perdure.turns import outbox, queries
from perdure.turns.calls import awaited
from perdure.turns.inbox.fire_schedules import fire_due
from perdure.turns.inbox.route_unrouted import route_due
from perdure.turns.lease import user_share, wait_for_model

log = logging.getLogger(__name__)

MOST_A_ROUND = 200
"""The most wake-ups of each kind that one round publishes."""

MOST_CROWDED_WAKES = 3
"""The most doublings of the pause before a postponed session's next wake-up. By default, the longest pause is 40 s."""

MOST_CONSOLIDATIONS = 50
"""The most sessions that one round wakes for consolidation. Consolidation is not urgent."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The numbers of wake-ups that a round published. `refused` counts the wake-ups that the broker refused."""

    sessions: int = 0
    deliveries: int = 0
    endings: int = 0
    refused: int = 0
    consolidations: int = 0


def sweep(
    runtime: Runtime, *, turns: bool = True, stopped_after: Callable[[float], bool] = lambda _: False
) -> Swept | None:
    """Run one round; returns `None` if another worker has taken the round.

    While the intake is closed, `turns` is False, and no turns are woken.

    `stopped_after(seconds)` waits for this time, and returns whether the worker is stopping. A round spreads its
    deliveries over at most half of the sweeper's interval, so that a burst of deliveries to a failed receiver does not
    delay turns.

    Raises:
        Unavailable: the database cannot be reached.
    """
    limits = runtime.settings.turn
    if not runtime.database.run(queries.TAKE_SWEEP, {"name": "turns", "every_s": limits.sweep_s}):
        return None
    most = MOST_A_ROUND if turns else 0
    rows = runtime.database.run(
        queries.WAKE_DUE,
        {
            "most": most,
            "most_paced": wait_for_model.MOST_A_ROUND,
            "backoff_s": limits.sweep_s,
            "lease_s": limits.lease_s,
        },
    )
    due = [(row.session_id, row.priority) for row in rows]
    if turns:
        due += user_share.admit_due(runtime.database, limits.user_concurrency, MOST_A_ROUND)
    refused = _wake_sessions(runtime, due)
    endings = endings_due(runtime.database, MOST_A_ROUND, limits.sweep_s, limits.lease_s)
    begun = 0 if refused else sum(1 for _ in takewhile(runtime.wake.ending, endings))
    if refused or endings[begun:]:
        runtime.database.run(queries.UNWAKE, {"session_ids": [*refused, *endings[begun:]]})
    if turns:
        route_due(runtime)
        fire_due(runtime)
    runtime.eraser.finish_due()
    awaited.probe_due(runtime, lambda: stopped_after(0))
    drawn = 0 if refused or endings[begun:] else _wake_consolidations(runtime)
    sent = 0 if refused or endings[begun:] else _wake_deliveries(runtime, stopped_after)
    swept = Swept(len(due) - len(refused), sent, begun, len(refused) + len(endings) - begun, drawn)
    if due or sent or endings:
        log.info(
            "swept: woke %d sessions, %d deliveries and %d endings, %d refused",
            swept.sessions, sent, begun, swept.refused,
        )  # fmt: skip
    return swept


def _wake_deliveries(runtime: Runtime, stopped_after: Callable[[float], bool]) -> int:
    """Publish wake-ups for the deliveries that are due, spread over time; returns their number."""
    sweep_s = runtime.settings.turn.sweep_s
    due, sent = outbox.due(runtime.database, MOST_A_ROUND, sweep_s), 0
    while sent < len(due) and runtime.wake.delivery(due[sent]):
        sent += 1
        if stopped_after(sweep_s / 2 / MOST_A_ROUND):
            break
    if due[sent:]:
        outbox.requeue(runtime.database, due[sent:])
    return sent


def _wake_consolidations(runtime: Runtime) -> int:
    """Publish wake-ups for ended sessions that still wait for consolidation; returns how many the broker accepted."""
    database, lease_s = runtime.database, runtime.settings.turn.lease_s
    found = consolidate.consolidations_to_wake(
        database, runtime.settings.consolidation, MOST_CONSOLIDATIONS, lease_s, lease_s
    )
    taken = sum(1 for _ in takewhile(runtime.wake.consolidation, found))
    if found[taken:]:
        consolidate.requeue(database, found[taken:])
    return taken


def postpone(runtime: Runtime, session_id: UUID) -> None:
    """Postpone a session whose wake-up reached a worker without a free slot.

    The sweeper wakes the session again. The pause grows each time, up to a limit.
    """
    runtime.database.run(queries.CROWDED, {"session_id": session_id, "most_wakes": MOST_CROWDED_WAKES})


def _wake_sessions(runtime: Runtime, due: list[tuple[UUID, int]]) -> list[UUID]:
    """Publish wake-ups until the broker refuses one; returns the sessions that were not woken."""
    for number, (session_id, priority) in enumerate(due):
        if not runtime.wake.session(session_id, priority):
            return [session_id for session_id, _ in due[number:]]
    return []
