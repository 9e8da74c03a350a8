"""Decides when a worker kills a child process that runs a turn, and counts a child that could not start.

While a tool holds the GIL, the child cannot react to a cancellation, a lost lease or a time limit. So the worker
decides when to kill the child. `Watch.see` makes the decision. `perdure.workers.isolated.kill` kills the child and
settles the turn.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from perdure.database.fencing import Fence
from perdure.observe.measures import Entry
from perdure.runtime import Runtime
from perdure.turns.lease import leave_queries, queries
from perdure.turns.lease.claim import Unequipped
from perdure.turns.lease.tenure import GRACE_S
from perdure.turns.outcome import Cancelled, Ending, Failed
from perdure.turns.run.loop import Runner
from perdure.turns.run.verdict import COULD_NOT_START, out_of_time

log = logging.getLogger(__name__)

LOST_S = 10.0
"""Seconds until a process is killed after its session was erased or claimed by another runner."""

IDLE_S = 60.0
"""The most seconds from the start of a process to its claim, and from the end of its last turn to its exit."""

START_S = 20.0
"""A process has at least this many seconds from its start to its claim, even if its turn has less time left."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A session and its oldest unsettled turn.

    `limit_s` is the turn's time limit. `spent_s` is the turn's run time at its last commit. `is_silent` tells that the
    process that holds the session has not renewed the lease in time.
    """

    fence: Fence
    owner: str | None
    turn_id: UUID | None
    tick: int
    spent_s: float
    limit_s: float
    is_silent: bool
    cancelled: bool


@dataclass(frozen=True, slots=True)
class Overdue:
    """The reason to kill a process.

    `ending` is the ending with which the worker settles the process's turn. `None`: there is no turn to settle.
    """

    reason: str
    ending: Ending | None = None


class Watch:
    """Watches one process. `owner` names the process in its lease. Times are monotonic."""

    def __init__(self, owner: str, now: float) -> None:
        self._owner = owner
        self._idle_since: float | None = now
        self._fence: Fence | None = None
        self._place: tuple[UUID | None, int] | None = None
        self._until = now

    def see(self, standing: Standing | None, now: float) -> Overdue | None:
        """The reason to kill the process, if it must be killed. `standing` is `None` if the session does not exist.

        If the broker accepts no wake-up, the process itself claims the session again, under a new fence. So a new fence
        is not a reason to kill if its owner is the same.

        A process whose turn is cancelled or out of time is killed only if the process no longer renews its lease.
        Otherwise the turn ends at its next safe point. A requested end of the session is not a reason to kill, because
        accepted turns run first.
        """
        if standing is None or (standing.owner != self._owner and self._fence not in (None, standing.fence)):
            return self._idle(now, LOST_S, "its session was erased, or claimed by another runner")
        if standing.owner != self._owner:
            left_s = max(standing.limit_s - standing.spent_s, START_S)
            return self._idle(now, min(left_s, IDLE_S), "it runs no turn and does not exit")
        self._idle_since, self._fence = None, standing.fence
        if self._place != (standing.turn_id, standing.tick):
            self._place = standing.turn_id, standing.tick
            self._until = now + standing.limit_s - standing.spent_s + GRACE_S
        return self._judge(standing, now) if standing.turn_id is not None and standing.is_silent else None

    def _judge(self, standing: Standing, now: float) -> Overdue | None:
        """The reason to kill a process that does not renew its lease, if it must be killed."""
        if standing.cancelled:
            return Overdue("its turn is cancelled", Cancelled())
        if now >= self._until:
            return Overdue("its turn's time is up", Failed(out_of_time(standing.limit_s)))
        return None

    def _idle(self, now: float, within_s: float, reason: str) -> Overdue | None:
        if self._idle_since is None:
            self._idle_since = now
        return Overdue(reason) if now - self._idle_since >= within_s else None


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a child process, which ran for `seconds`.

    `error` is the reason if the child may have ended before it claimed the session. `None`: it ran, or it was stopped.
    The error counts as a failed attempt if it is `charged`. An error is not charged if a server cannot be reached.
    `left`: the child left the session to another worker. `outcomes`: see `Ran`. `measured`: what it
    counted and timed.
    """

    seconds: float
    error: str | None = None
    charged: bool = True
    left: Unequipped | None = None
    outcomes: tuple[str, ...] = ()
    measured: Sequence[Entry] = field(default=(), compare=False)


def count_failed_start(runtime: Runtime, runner: Runner, session_id: UUID, fence: Fence, ended: ChildEnd) -> None:
    """Count a child that ended before it claimed the session. Does nothing if the child claimed it.

    `fence` is the session's fence before the start. The child's time counts towards the turn's time limit. A charged
    error also counts as a failed attempt.
    """
    limits = runtime.settings.turn
    given = {
        **fence.on(session_id),
        "lease_s": limits.lease_s,
        "max_attempts": limits.max_attempts,
        "elapsed_s": ended.seconds,
        "charged": int(ended.charged),
        "error": f"{COULD_NOT_START} {ended.error}",
    }
    for row in runtime.database.run(leave_queries.FAILED_START, given):
        log.log(
            logging.ERROR if ended.charged else logging.WARNING,
            "turn %s: its process could not start, %d of %d attempts failed: %s",
            row.turn_id, row.strikes, limits.max_attempts, ended.error,
        )  # fmt: skip
        agent = runtime.agents.find(row.agent)
        limit_s = (agent and agent.timeout_s) or limits.timeout_s
        if row.spent_s >= limit_s:
            runner.settle_unrun(session_id, row.turn_id, Failed(out_of_time(limit_s)))


def look(runtime: Runtime, session_ids: Iterable[UUID]) -> dict[UUID, Standing]:
    """Read the state of sessions in one statement. Sessions that do not exist are not in the result."""
    limits = runtime.settings.turn
    timeouts = {agent.name: agent.timeout_s for agent in runtime.agents}
    unrenewed_s = limits.heartbeat_s + GRACE_S
    return {
        row.session_id: Standing(
            fence=Fence(row.token, row.nonce),
            owner=row.lease_owner,
            turn_id=row.turn_id,
            tick=row.tick,
            spent_s=row.spent_s,
            limit_s=timeouts.get(row.agent) or limits.timeout_s,
            is_silent=row.left_s is not None and limits.lease_s - row.left_s > unrenewed_s,
            cancelled=row.cancelled,
        )
        for row in runtime.database.run(queries.WATCH_ISOLATED, {"session_ids": list(session_ids)})
    }
