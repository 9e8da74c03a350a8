"""The sweeper: issues wake-ups again for work that is due and that no worker runs.

Runs in every worker, every few seconds. One worker takes a round by a compare-and-set on a row, so no lock outlives a
statement, and a paused sweeper blocks no other. A round issues a bounded number of wake-ups and backs off per session.
"""

from __future__ import annotations

import logging
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
"""Wake-ups that one round issues at the most."""

MOST_CROWDED_WAKES = 3
"""Doublings of the pause after which a session is woken again that found no room: 40 s with the defaults."""

MOST_CONSOLIDATIONS = 50
"""The same for what waits to become memories: it is in no hurry."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a round issued: wake-ups for sessions, deliveries, endings, consolidations, and those the broker refused."""

    sessions: int = 0
    deliveries: int = 0
    endings: int = 0
    refused: int = 0
    consolidations: int = 0


def sweep(runtime: Runtime, *, turns: bool = True) -> Swept | None:
    """One round; None if it is somebody else's. Without `turns` none is woken: the fleet takes nothing in.

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
    deliveries = outbox.due(runtime.database, MOST_A_ROUND, limits.sweep_s)
    sent = 0 if refused else sum(1 for _ in takewhile(runtime.wake.delivery, deliveries))
    if deliveries[sent:]:
        outbox.put_back(runtime.database, deliveries[sent:])
    endings = endings_due(runtime.database, MOST_A_ROUND, limits.sweep_s, limits.lease_s)
    begun = 0 if refused else sum(1 for _ in takewhile(runtime.wake.ending, endings))
    runtime.eraser.finish_due()
    drawn = 0 if refused or endings[begun:] else _consolidations(runtime)
    swept = Swept(len(due) - len(refused), sent, begun, len(refused) + len(endings) - begun, drawn)
    if refused or endings[begun:]:
        runtime.database.run(queries.UNWAKE, {"session_ids": [*refused, *endings[begun:]]})
    if due or deliveries or endings:
        log.info(
            "swept: woke %d sessions, %d deliveries and %d endings, %d refused",
            swept.sessions, sent, begun, swept.refused,
        )  # fmt: skip
    return swept


def _consolidations(runtime: Runtime) -> int:
    """Wake for the sessions that have ended a while ago and still wait to be consolidated; how many were taken."""
    database, lease_s = runtime.database, runtime.settings.turn.lease_s
    found = consolidate.consolidations_to_wake(
        database, runtime.settings.consolidation, MOST_CONSOLIDATIONS, lease_s, lease_s
    )
    taken = sum(1 for _ in takewhile(runtime.wake.consolidation, found))
    if found[taken:]:
        consolidate.requeue(database, found[taken:])
    return taken


def postpone(runtime: Runtime, session_id: UUID) -> None:
    """A worker that took a session's wake-up has no room: the sweeper wakes it again, after a pause that grows."""
    runtime.database.run(queries.CROWDED, {"session_id": session_id, "most_wakes": MOST_CROWDED_WAKES})


def _refused(runtime: Runtime, due: list[tuple[UUID, int]]) -> list[UUID]:
    """Wake each; those that the broker did not take. After the first refusal the rest is not tried."""
    for number, (session_id, priority) in enumerate(due):
        if not runtime.wake.session(session_id, priority):
            return [session_id for session_id, _ in due[number:]]
    return []
