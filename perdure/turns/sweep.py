"""The sweeper: issues wake-ups again for work that is due and that no worker runs.

Every worker runs it every few seconds. One worker takes a round by a compare-and-set on a row, so no lock outlives a
statement, and a paused sweeper blocks no other. A round issues a bounded number of wake-ups and backs off per session.
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
from perdure.turns.lease import parking, user_share

log = logging.getLogger(__name__)

MOST_A_ROUND = 200
"""The most wake-ups of one kind in a round."""

MOST_CROWDED_WAKES = 3
"""The most doublings of the pause before a session that found no free place is woken again: 40 s by default."""

MOST_CONSOLIDATIONS = 50
"""The most wake-ups for consolidations in a round; they are not urgent."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The wake-ups of a round, and those that the broker refused."""

    sessions: int = 0
    deliveries: int = 0
    endings: int = 0
    refused: int = 0
    consolidations: int = 0


def sweep(
    runtime: Runtime, *, turns: bool = True, stopped_after: Callable[[float], bool] = lambda _: False
) -> Swept | None:
    """Run one round; `None` if another worker has taken it. Without `turns`, no turn is woken: the intake is closed.

    `stopped_after(seconds)` waits and returns whether the worker is stopping. A round spreads its deliveries over at
    most half of the sweeper's interval, so that deliveries to a failed receiver do not compete with the turns in one
    burst.

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
            "most_paced": parking.MOST_A_ROUND,
            "backoff_s": limits.sweep_s,
            "lease_s": limits.lease_s,
        },
    )
    due = [(row.session_id, row.priority) for row in rows]
    if turns:
        due += user_share.admit_due(runtime.database, limits.user_concurrency, MOST_A_ROUND)
    refused = _refused(runtime, due)
    endings = endings_due(runtime.database, MOST_A_ROUND, limits.sweep_s, limits.lease_s)
    begun = 0 if refused else sum(1 for _ in takewhile(runtime.wake.ending, endings))
    runtime.eraser.finish_due()
    drawn = 0 if refused or endings[begun:] else _consolidations(runtime)
    sent = 0 if refused or endings[begun:] else _deliveries(runtime, stopped_after)
    swept = Swept(len(due) - len(refused), sent, begun, len(refused) + len(endings) - begun, drawn)
    if refused or endings[begun:]:
        runtime.database.run(queries.UNWAKE, {"session_ids": [*refused, *endings[begun:]]})
    if due or sent or endings:
        log.info(
            "swept: woke %d sessions, %d deliveries and %d endings, %d refused",
            swept.sessions, sent, begun, swept.refused,
        )  # fmt: skip
    return swept


def _deliveries(runtime: Runtime, stopped_after: Callable[[float], bool]) -> int:
    """Publish wake-ups for the deliveries that are due, spread over time; the count."""
    sweep_s = runtime.settings.turn.sweep_s
    due, sent = outbox.due(runtime.database, MOST_A_ROUND, sweep_s), 0
    while sent < len(due) and runtime.wake.delivery(due[sent]):
        sent += 1
        if stopped_after(sweep_s / 2 / MOST_A_ROUND):
            break
    if due[sent:]:
        outbox.put_back(runtime.database, due[sent:])
    return sent


def _consolidations(runtime: Runtime) -> int:
    """Publish wake-ups for sessions that ended some time ago and are not consolidated; the count."""
    database, lease_s = runtime.database, runtime.settings.turn.lease_s
    found = consolidate.consolidations_to_wake(
        database, runtime.settings.consolidation, MOST_CONSOLIDATIONS, lease_s, lease_s
    )
    taken = sum(1 for _ in takewhile(runtime.wake.consolidation, found))
    if found[taken:]:
        consolidate.requeue(database, found[taken:])
    return taken


def put_off(runtime: Runtime, session_id: UUID) -> None:
    """Have the sweeper wake a session again, after a growing pause: this worker has no free place for it."""
    runtime.database.run(queries.CROWDED, {"session_id": session_id, "most_wakes": MOST_CROWDED_WAKES})


def _refused(runtime: Runtime, due: list[tuple[UUID, int]]) -> list[UUID]:
    """Publish wake-ups until the broker refuses one; returns the sessions without a wake-up."""
    for number, (session_id, priority) in enumerate(due):
        if not runtime.wake.session(session_id, priority):
            return [session_id for session_id, _ in due[number:]]
    return []
