"""Claiming a session. The claim raises the session's fence; every later commit of the turn requires this fence.

While a deployment adds an agent or a tool, or changes an agent whose turns are pinned, some workers do not have what a
turn needs. Such a worker leaves the session to another one: it counts no attempt, and publishes the session's wake-up
again. The broker gives the wake-up to a waiting worker. A worker that receives a wake-up for a session that it has just
left drops it, so a wake-up visits each worker about once. The sweeper then wakes the session again. If a worker's child
process leaves a session, the worker remembers it, but publishes no wake-up: each worker that receives it would start a
child process.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.agents import Agents
from perdure.database.engine import Database, Statement, as_json
from perdure.database.fencing import Fence
from perdure.errors import Unavailable, loggable
from perdure.observe.measures import Measures
from perdure.runtime import Runtime
from perdure.settings import TurnSettings
from perdure.turns.lease import death_queries, queries
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from perdure.turns.lease.tenure import LeaseLost, Tenure

log = logging.getLogger(__name__)

CHILD_S = 60.0
"""Seconds for which a worker remembers that a child of it has left a session: the start of a child is expensive."""

_NO_LIMIT = 2**31 - 1
_NO_SESSION = UUID(int=0)

_CHOSEN = 16
"""How many due sessions a claim of the next one first chooses from. As many workers can claim at the same moment."""

_LOCKED_TRIES = 5
_LOCKED_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Ran:
    """This process claimed the session, and settled `settled` turns before it released the session."""

    settled: int
    outcomes: tuple[str, ...] = field(default=(), compare=False)
    """Of each settled turn, its status and the code of its error."""


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """The session cannot be claimed: a worker holds it, it has no turn to run now, or the intake is closed."""


@dataclass(frozen=True, slots=True)
class NeedsIsolation:
    """The turn was claimed `claims` times without ending: it must run in a dedicated process.

    `fence` is the fence of the last claim. `cancelled_id` is the turn's id if it is cancelled and no process may still
    run it: then it is only settled.
    """

    claims: int
    fence: Fence | None = field(default=None, compare=False)
    cancelled_id: UUID | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Queued:
    """The user has reached the limit of concurrent turns: the session waits until one of the user's turns ends."""


@dataclass(frozen=True, slots=True)
class Unequipped:
    """This process lacks the agent or the tool `lacks`, which the session's turn needs. Another worker may have it."""

    lacks: str
    priority: int = field(compare=False)


Refusal = NotNeeded | NeedsIsolation | Queued | Unequipped
"""Why this process does not run a session."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What `Claims.draw` found: the tenure of a session, or why this process does not run it; `None`: none is due.

    `next_due` is another session that is due, with its effective priority.
    """

    session_id: UUID
    found: Tenure | Refusal | None
    next_due: tuple[UUID, int] | None = None


def claim(
    runtime: Runtime, session_id: UUID, owner: str, *, alone: bool = False, agents: Agents | None = None
) -> Tenure | Refusal:
    """Take a session's lease if it is free, and begin the session's oldest unsettled turn.

    `alone` tells that this process runs only this session, so it may claim a turn that needs isolation. A turn that is
    out of attempts does not run, it is only settled: any process may claim it. `agents` are those whose turns this
    process can run; `None`: all.

    If the session's last holder has died, the death is first charged to one of the turns that the holder ran.
    """
    database, limits, asked_at = runtime.database, runtime.settings.turn, runtime.clock.monotonic()
    parameters = _parameters(runtime, session_id, owner, agents)
    isolate_from = _NO_LIMIT if alone else ISOLATE_FROM_CLAIM
    rows = database.run(queries.CLAIM, {**parameters, "isolate_from": isolate_from})
    if rows and not rows[0].blamed:
        _blame(database, session_id, limits)
        rows = database.run(queries.CLAIM, {**parameters, "isolate_from": isolate_from})
    refused = bool(rows) and rows[0].blamed and rows[0].token is None
    if refused and rows[0].strikes_before >= limits.max_attempts:
        rows = database.run(queries.CLAIM, {**parameters, "isolate_from": _NO_LIMIT})
    if not rows or not rows[0].blamed:  # not blamed: the session's row was locked
        return NotNeeded()
    return _claimed(runtime, session_id, rows[0], asked_at, alone=alone)


def _parameters(runtime: Runtime, session_id: UUID, owner: str, agents: Agents | None) -> dict[str, Any]:
    limits = runtime.settings.turn
    return {
        "session_id": session_id,
        "owner": owner,
        "lease_s": limits.lease_s,
        "user_concurrency": limits.user_concurrency,
        "max_attempts": limits.max_attempts,
        "unknown_agent_s": limits.unknown_agent_s,
        "fingerprints": None if agents is None else as_json(agents.fingerprints),
        "pinned": limits.pin_agents,
    }


def _claimed(
    runtime: Runtime, session_id: UUID, row: Row[Any], asked_at: float, *, alone: bool = False
) -> Tenure | Refusal:
    """What a row of a claiming statement, sent at `asked_at` of the monotonic clock, tells about the session."""
    if not row.equipped:
        what = f"the agent {row.agent_wanted!r}"
        if runtime.agents.find(row.agent_wanted) is not None:
            what += f" as it was when the turn began (fingerprint {row.fingerprint_wanted})"
        return Unequipped(what, row.priority)
    if not row.free:
        return Queued()
    if row.token is None:
        return NeedsIsolation(row.claims_before, Fence(row.token_before, row.nonce_before), row.cancelled_id)
    tenure = Tenure.claimed(session_id, row, runtime.clock, runtime.settings.turn.lease_s)
    tenure.renewed(asked_at)
    tenure.alone, tenure.overdue = alone, row.overdue
    _measure(runtime.measures, row)
    return tenure


def _measure(measures: Measures, row: Row[Any]) -> None:
    if row.waited_s is not None:
        measures.stage("claim", row.waited_s)
    if row.taken_over:
        measures.lease_taken_over()
    if row.strikes_before:
        measures.step_repeated()


def claim_patiently(
    runtime: Runtime, session_id: UUID, owner: str, *, alone: bool = False, agents: Agents | None = None
) -> Tenure | Refusal:
    """Like `claim`, but tries again for a moment while another transaction holds the lock of the session's row."""
    given = {"session_id": session_id, "lease_s": runtime.settings.turn.lease_s}
    for _ in range(_LOCKED_TRIES):
        found = claim(runtime, session_id, owner, alone=alone, agents=agents)
        if not isinstance(found, NotNeeded):
            return found
        rows = runtime.database.run(queries.CLAIMABLE, given)
        if not rows or not rows[0].claimable:
            return found
        time.sleep(_LOCKED_PAUSE_S)
    return claim(runtime, session_id, owner, alone=alone, agents=agents)


def _blame(database: Database, session_id: UUID, limits: TurnSettings) -> None:
    """Charge the death of the process that holds the session's expired lease to one of its turns."""

    def judge(blame: Statement) -> None:
        with database.transaction("turns.blame") as transaction:
            transaction.run(death_queries.LOCK_DEATH, {"session_id": session_id})
            transaction.run(blame, {"session_id": session_id, "lease_s": limits.lease_s})

    try:
        judge(death_queries.BLAME)
    except Unavailable as error:  # a session is locked for long, or its lock waits for this one
        log.warning("a dead process's sessions are judged without the locked ones: %s", loggable(error))
        judge(death_queries.BLAME_UNLOCKED)


def read_again(runtime: Runtime, tenure: Tenure) -> None:
    """Bring `tenure` up to date: read the turn at hand again, or begin the next one if it is settled.

    Raises:
        LeaseLost: another worker has the session.
    """
    given = {"lease_s": tenure.lease_s, "fingerprints": as_json(runtime.agents.fingerprints)}
    rows = runtime.database.run(queries.BEGIN_NEXT, {**tenure.fenced, **given})
    if not rows:
        raise LeaseLost
    tenure.read(rows[0])


class Claims:
    """The claims of this process, `owner`, and the sessions that it, or a child of it, has just left to other workers.

    A session that this process has left itself is remembered for `PERDURE_TURN__SWEEP_S` seconds.
    """

    def __init__(self, runtime: Runtime, owner: str) -> None:
        self._runtime = runtime
        self._owner = owner
        self._left_until: dict[UUID, float] = {}

    def claim(self, session_id: UUID, *, alone: bool = False) -> Tenure | Refusal:
        """Claim the session, unless it was just left here and still waits for another worker; see `claim_patiently`.

        A session whose turn needs an agent that this process lacks is left to another worker.
        """
        unknown_agent_s = self._runtime.settings.turn.unknown_agent_s
        if self._left_until.get(session_id, 0.0) > self._runtime.clock.monotonic():
            given = {"session_id": session_id, "unknown_agent_s": unknown_agent_s}
            rows = self._runtime.database.run(queries.IS_UNEQUIPPED, given)
            if rows and rows[0].unequipped:
                return NotNeeded()
        found = claim_patiently(self._runtime, session_id, self._owner, alone=alone, agents=self._runtime.agents)
        if isinstance(found, Unequipped):
            self.leave(session_id, found, publish=not alone)
        return found

    def draw(self, named: UUID | None) -> Drawn:
        """Claim the session `named` if it needs the wake-up that names it, else the next due session.

        See `queries.DRAINABLE`. While other transactions hold the locks of all sessions from which a claim chooses,
        tries again for a moment if the session that was named is one of them, or if there may be more: then each time
        among four times as many. Who has locked the others runs them or wakes them.
        """
        runtime = self._runtime
        given = {
            **_parameters(runtime, named or _NO_SESSION, self._owner, runtime.agents),
            "isolate_from": ISOLATE_FROM_CLAIM,
            "aging_s": runtime.settings.turn.priority_aging_s,
        }
        for tried in range(_LOCKED_TRIES + 1):
            asked_at = runtime.clock.monotonic()
            most = _CHOSEN << 2 * tried
            [row] = runtime.database.run(queries.CLAIM_DUE, {**given, "most": most})
            next_due = None if row.next_id is None else (row.next_id, row.next_priority)
            if row.is_special and named is not None:
                return Drawn(named, self.claim(named), next_due)
            if row.session_id is not None:
                found = _claimed(runtime, row.session_id, row, asked_at)
                if isinstance(found, Unequipped):
                    self.leave(row.session_id, found, publish=True)
                return Drawn(row.session_id, found, next_due)
            if not row.names_due and row.due < most:
                break
            if tried < _LOCKED_TRIES:
                time.sleep(_LOCKED_PAUSE_S)
        return Drawn(named or _NO_SESSION, None)

    def next_due(self) -> tuple[UUID, int] | None:
        """The session that the next draw would claim, with its effective priority."""
        given = {"aging_s": self._runtime.settings.turn.priority_aging_s}
        rows = self._runtime.database.run(queries.NEXT_DUE, given)
        return (rows[0].session_id, rows[0].priority) if rows else None

    def leave(self, session_id: UUID, unequipped: Unequipped, *, publish: bool) -> None:
        """Record that this process has left the session, and publish its wake-up; or that a child of it has left it."""
        log.warning("session %s is left to another worker: this one lacks %s", session_id, unequipped.lacks)
        now = self._runtime.clock.monotonic()
        self._left_until = {each: until for each, until in list(self._left_until.items()) if until > now}
        self._left_until[session_id] = now + (self._runtime.settings.turn.sweep_s if publish else CHILD_S)
        if publish:
            self._runtime.wake.session(session_id, unequipped.priority)
