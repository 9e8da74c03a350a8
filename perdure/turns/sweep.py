"""The sweeper: publishes wake-ups for work that is due and that no worker runs.

Every worker tries to run a round every few seconds. A compare-and-set on a row decides which worker runs the round. So
no lock outlives a statement, and a paused sweeper does not block other workers. A round publishes a bounded number of
wake-ups. The pause between two wake-ups of a session grows until a worker claims the session.

The duties of a round (`DUTIES`) stand alone: a duty that fails keeps no other from its turn (see
`perdure.resilience.duties`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(slots=True)
class Swept:
    """The numbers of wake-ups that a round published. `refused` counts the wake-ups that the broker refused."""

    sessions: int = 0
    deliveries: int = 0
    endings: int = 0
    refused: int = 0
    consolidations: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the sweeper, which each duty receives.

    While the intake is closed, `turns` is False, and no turns are woken. `stopped_after(seconds)` waits for this time,
    and returns whether the worker is stopping.
    """

    runtime: Runtime
    turns: bool
    stopped_after: Callable[[float], bool]
    swept: Swept = field(default_factory=Swept)


def sweep(
    runtime: Runtime, *, turns: bool = True, stopped_after: Callable[[float], bool] = lambda _: False
) -> Swept | None:
    """Run one round; returns `None` if another worker has taken the round.

    Each of `DUTIES` runs, even if others fail. `turns` and `stopped_after`: see `Round`.

    Raises:
        Unavailable: the database cannot be reached.
    """
    if not runtime.database.run(queries.TAKE_SWEEP, {"name": "turns", "every_s": runtime.settings.turn.sweep_s}):
        return None
    this = Round(runtime, turns, stopped_after)
    for name, duty in DUTIES.items():
        runtime.duties.run(name, partial(duty, this))
    swept = this.swept
    if swept.sessions or swept.deliveries or swept.endings or swept.refused:
        log.info(
            "swept: woke %d sessions, %d deliveries and %d endings, %d refused",
            swept.sessions, swept.deliveries, swept.endings, swept.refused,
        )  # fmt: skip
    return swept


def _wake_turns(this: Round) -> None:
    """Wake sessions that have unsettled turns and that no worker holds."""
    limits = this.runtime.settings.turn
    rows = this.runtime.database.run(
        queries.WAKE_DUE,
        {
            "most": MOST_A_ROUND if this.turns else 0,
            "most_paced": wait_for_model.MOST_A_ROUND,
            "backoff_s": limits.sweep_s,
            "lease_s": limits.lease_s,
        },
    )
    _wake_sessions(this, [(row.session_id, row.priority) for row in rows])


def _admit_turns(this: Round) -> None:
    """Admit and wake queued sessions of users with free places."""
    if this.turns:
        most = this.runtime.settings.turn.user_concurrency
        _wake_sessions(this, user_share.admit_due(this.runtime.database, most, MOST_A_ROUND))


def _wake_sessions(this: Round, due: list[tuple[UUID, int]]) -> None:
    """Publish wake-ups until the broker refuses one. The sessions that were not woken are due in the next round."""
    wake, swept = this.runtime.wake, this.swept
    woken = 0 if swept.refused else sum(1 for _ in takewhile(lambda each: wake.session(*each), due))
    swept.sessions += woken
    _unwake(this, [session_id for session_id, _ in due[woken:]])


def _wake_endings(this: Round) -> None:
    """Publish wake-ups for the sessions whose end is due."""
    limits = this.runtime.settings.turn
    due = endings_due(this.runtime.database, MOST_A_ROUND, limits.sweep_s, limits.lease_s)
    woken = 0 if this.swept.refused else sum(1 for _ in takewhile(this.runtime.wake.ending, due))
    this.swept.endings += woken
    _unwake(this, due[woken:])


def _unwake(this: Round, refused: list[UUID]) -> None:
    this.swept.refused += len(refused)
    if refused:
        this.runtime.database.run(queries.UNWAKE, {"session_ids": refused})


def _wake_consolidations(this: Round) -> None:
    """Publish wake-ups for ended sessions that still wait for consolidation."""
    if this.swept.refused:
        return
    database, lease_s = this.runtime.database, this.runtime.settings.turn.lease_s
    found = consolidate.consolidations_to_wake(
        database, this.runtime.settings.consolidation, MOST_CONSOLIDATIONS, lease_s, lease_s
    )
    taken = this.swept.consolidations = sum(1 for _ in takewhile(this.runtime.wake.consolidation, found))
    if found[taken:]:
        consolidate.requeue(database, found[taken:])


def _wake_deliveries(this: Round) -> None:
    """Publish wake-ups for the deliveries that are due.

    They are spread over at most half of the sweeper's interval, so that a burst of deliveries to a failed receiver does
    not delay turns.
    """
    if this.swept.refused:
        return
    database, sweep_s = this.runtime.database, this.runtime.settings.turn.sweep_s
    due, sent = outbox.due(database, MOST_A_ROUND, sweep_s), 0
    while sent < len(due) and this.runtime.wake.delivery(due[sent]):
        sent += 1
        if this.stopped_after(sweep_s / 2 / MOST_A_ROUND):
            break
    this.swept.deliveries = sent
    if due[sent:]:
        outbox.requeue(database, due[sent:])


def _route(this: Round) -> None:
    if this.turns:
        route_due(this.runtime)


def _fire_reminders(this: Round) -> None:
    if this.turns:
        fire_due(this.runtime)


DUTIES: dict[str, Callable[[Round], object]] = {
    "turns": _wake_turns,
    "admission": _admit_turns,
    "endings": _wake_endings,
    "routing": _route,
    "reminders": _fire_reminders,
    "erasures": lambda this: this.runtime.eraser.finish_due(),
    "tools": lambda this: awaited.probe_due(this.runtime, lambda: this.stopped_after(0)),
    "consolidations": _wake_consolidations,
    "deliveries": _wake_deliveries,
}
"""What a round does, in this order, by the names in the log. No duty depends on the success of another."""


def postpone(runtime: Runtime, session_id: UUID) -> None:
    """Postpone a session whose wake-up reached a worker without a free slot.

    The sweeper wakes the session again. The pause grows each time, up to a limit.
    """
    runtime.database.run(queries.CROWDED, {"session_id": session_id, "most_wakes": MOST_CROWDED_WAKES})
