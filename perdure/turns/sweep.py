"""The sweeper: publishes wake-ups for work that is due and that no worker runs.

Every worker tries to run a round every few seconds. A compare-and-set on a row decides which worker runs the round. So
no lock outlives a statement, and a paused sweeper does not block other workers. A round publishes a bounded number of
wake-ups. A longer backlog is woken at the speed at which workers take the wake-ups. The pause between two wake-ups of a
session grows until a worker claims the session.

The duties of a round (`DUTIES`) stand alone: a duty that fails keeps no other from its turn (see
`perdure.resilience.duties`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any
from uuid import UUID

from perdure.memory.consolidation import consolidate
from perdure.runtime import Runtime
from perdure.turns import drain, queries
from perdure.turns.inbox.fire_schedules import fire_due
from perdure.turns.inbox.route_unrouted import route_due
from perdure.turns.lease.pace import Paces
from perdure.turns.waking import DueDeliveries, DueEndings, DueSessions, QueuedSessions, Wakes

log = logging.getLogger(__name__)

MOST_A_ROUND = 200
"""The most wake-ups of each kind that a round publishes before workers take them."""

MOST_CROWDED_WAKES = 3
"""The most doublings of the pause before a postponed session's next wake-up. By default, the longest pause is 40 s."""

MOST_CONSOLIDATIONS = 50
"""The most sessions that one round wakes for consolidation. Consolidation is not urgent."""

_OF_TURNS = ("turns", "admission")
"""The kinds of wake-ups, among those of `Round.wakes`, that begin turns."""

PAUSE_S = 0.25
"""Seconds between two passes of a round."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The numbers of wake-ups that a round published. `refused` counts the sessions that the broker refused."""

    sessions: int = 0
    deliveries: int = 0
    endings: int = 0
    refused: int = 0
    consolidations: int = 0


class Round:
    """One round of the sweeper, which each duty receives.

    While the intake is closed, `turns` is False, and no turns are woken. `stopped_after(seconds)` waits for this time,
    and returns whether the worker is stopping. `paces` is the stored state of `Paces`.
    """

    def __init__(
        self, runtime: Runtime, paces: dict[str, Any] | None, stopped_after: Callable[[float], bool], *, turns: bool
    ) -> None:
        self.runtime = runtime
        self.turns = turns
        self.stopped_after = stopped_after
        self.consolidations = 0
        self.wakes: dict[str, Wakes[Any]] = {
            "turns": Wakes(DueSessions(runtime, Paces(runtime.database, paces), turns=turns), MOST_A_ROUND),
            "admission": Wakes(QueuedSessions(runtime, turns=turns), MOST_A_ROUND),
            "endings": Wakes(DueEndings(runtime), MOST_A_ROUND),
            "deliveries": Wakes(DueDeliveries(runtime), MOST_A_ROUND),
        }

    @property
    def is_refused(self) -> bool:
        """Whether the broker refused a wake-up of this round. The round then publishes no further ones."""
        return any(each.refused for each in self.wakes.values())

    @property
    def swept(self) -> Swept:
        """The numbers of wake-ups so far."""
        published = {name: each.published for name, each in self.wakes.items()}
        refused = sum(self.wakes[name].refused for name in ("turns", "admission", "endings"))
        sessions = published["turns"] + published["admission"]
        return Swept(sessions, published["deliveries"], published["endings"], refused, self.consolidations)

    def full(self) -> list[str]:
        """The kinds of which more is probably due, without turns while these are not woken."""
        return [name for name, each in self.wakes.items() if each.is_full and (self.turns or name not in _OF_TURNS)]

    def wake(self, kind: str) -> None:
        """Publish wake-ups of a kind, unless the broker refuses them."""
        if not self.is_refused:
            self.wakes[kind].wake()


def sweep(
    runtime: Runtime, *, turns: bool = True, stopped_after: Callable[[float], bool] = lambda _: False
) -> Swept | None:
    """Run one round; returns `None` if another worker has taken the round.

    Each of `DUTIES` runs, even if others fail. `turns` and `stopped_after`: see `Round`. If more is due of a kind than
    `MOST_A_ROUND`, the round goes on until the next one is due, and publishes further wake-ups as workers take the
    earlier ones.
    """
    limits = runtime.settings.turn
    taken = runtime.database.run(queries.TAKE_SWEEP, {"name": "turns", "every_s": limits.sweep_s})
    if not taken:
        return None
    until = runtime.clock.monotonic() + limits.sweep_s
    this = Round(runtime, taken[0].paces, stopped_after, turns=turns)
    for name, duty in DUTIES.items():
        runtime.duties.run(name, partial(duty, this))
    _log(this.swept, Swept())
    _continue(this, until)
    return this.swept


def _continue(this: Round, until: float) -> None:
    """Wake what else is due, as workers take the earlier wake-ups, until the time `until` of the monotonic clock.

    Once the intake is closed, no further turns are woken.
    """
    runtime = this.runtime
    for _ in range(int(runtime.settings.turn.sweep_s / PAUSE_S)):
        if not this.full() or this.is_refused or this.stopped_after(PAUSE_S) or runtime.clock.monotonic() >= until:
            return
        if this.turns and drain.is_active(runtime.database):
            this.turns = False
        before = this.swept
        for name in this.full():
            runtime.duties.run(name, partial(DUTIES[name], this))
        _log(this.swept, before)


def _log(swept: Swept, before: Swept) -> None:
    """Log what was woken since `before`."""
    woken = swept.sessions - before.sessions, swept.deliveries - before.deliveries, swept.endings - before.endings
    refused = swept.refused - before.refused
    if any(woken) or refused:
        log.info("swept: woke %d sessions, %d deliveries and %d endings, %d refused", *woken, refused)


def _wake_consolidations(this: Round) -> None:
    """Publish wake-ups for ended sessions that still wait for consolidation."""
    if this.is_refused:
        return
    database, lease_s = this.runtime.database, this.runtime.settings.turn.lease_s
    found = consolidate.consolidations_to_wake(
        database, this.runtime.settings.consolidation, MOST_CONSOLIDATIONS, lease_s, lease_s
    )
    taken = this.consolidations = sum(1 for _ in takewhile(this.runtime.wake.consolidation, found))
    if found[taken:]:
        consolidate.requeue(database, found[taken:])


def _route(this: Round) -> None:
    if this.turns:
        route_due(this.runtime)


def _fire_reminders(this: Round) -> None:
    if this.turns:
        fire_due(this.runtime)


DUTIES: dict[str, Callable[[Round], object]] = {
    "turns": lambda this: this.wake("turns"),
    "admission": lambda this: this.wake("admission"),
    "endings": lambda this: this.wake("endings"),
    "routing": _route,
    "reminders": _fire_reminders,
    "consolidations": _wake_consolidations,
    "deliveries": lambda this: this.wake("deliveries"),
}
"""What a round does, in this order, by the names in the log. No duty depends on the success of another.

What waits for a third party is no duty of the sweeper, since it would hold up the others: see `workers.upkeep`, and
`awaited.probe_due`, which a thread of each worker calls.
"""


def postpone(runtime: Runtime, session_id: UUID) -> None:
    """Postpone a session whose wake-up reached a worker without a free slot.

    The sweeper wakes the session again. The pause grows each time, up to a limit.
    """
    runtime.database.run(queries.CROWDED, {"session_id": session_id, "most_wakes": MOST_CROWDED_WAKES})
