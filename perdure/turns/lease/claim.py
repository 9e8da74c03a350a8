"""Claiming a session. The claim raises the session's fence; every later commit of the turn requires this fence."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.engine import Database, Statement
from perdure.database.fencing import Fence
from perdure.errors import Unavailable, loggable
from perdure.runtime import Runtime
from perdure.settings import TurnSettings
from perdure.snapshots.store import Version
from perdure.text.untrusted import load_object
from perdure.turns.lease import death_queries, queries
from perdure.turns.lease.tenure import Before, LeaseLost, Tenure, TurnRow

log = logging.getLogger(__name__)

ISOLATE_FROM_CLAIM = 2
"""After this number of claims of a turn, only a dedicated process may claim it."""

_NO_LIMIT = 2**31 - 1

_LOCKED_TRIES = 5
_LOCKED_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Ran:
    """This process claimed the session, and settled `settled` turns before it released the session."""

    settled: int


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """The session cannot be claimed: a worker holds it, it has no turn to run now, or the intake is closed."""


@dataclass(frozen=True, slots=True)
class NeedsIsolation:
    """The turn was claimed `claims` times without ending: it must run in a dedicated process.

    `fence` is the fence of the last claim. `cancelled`: the turn is cancelled, and no process may still run it, so it
    is only settled.
    """

    claims: int
    fence: Fence | None = field(default=None, compare=False)
    cancelled: bool = field(default=False, compare=False)


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


def claim(
    runtime: Runtime, session_id: UUID, owner: str, *, alone: bool = False, agents: Sequence[str] | None = None
) -> Tenure | Refusal:
    """Take a session's lease if it is free, and begin the session's oldest unsettled turn.

    `alone` tells that this process runs only this session, so it may claim a turn that needs isolation. A turn that is
    out of attempts does not run, it is only settled: any process may claim it. `agents` names the agents whose turns
    this process can run; `None`: all.

    If the session's last holder has died, the death is first charged to one of the turns that the holder ran.
    """
    database, limits, asked_at = runtime.database, runtime.settings.turn, runtime.clock.monotonic()
    parameters = {
        "session_id": session_id,
        "owner": owner,
        "lease_s": limits.lease_s,
        "user_concurrency": limits.user_concurrency,
        "max_attempts": limits.max_attempts,
        "unknown_agent_s": limits.unknown_agent_s,
        "agents": None if agents is None else list(agents),
    }
    isolate_from = _NO_LIMIT if alone else ISOLATE_FROM_CLAIM
    rows = database.run(queries.CLAIM, {**parameters, "isolate_from": isolate_from})
    if rows and not rows[0].blamed:
        _blame(database, session_id, limits)
        rows = database.run(queries.CLAIM, {**parameters, "isolate_from": isolate_from})
    refused = bool(rows) and rows[0].blamed and rows[0].free and rows[0].token is None
    if refused and rows[0].strikes_before >= limits.max_attempts:
        rows = database.run(queries.CLAIM, {**parameters, "isolate_from": _NO_LIMIT})
    if not rows or not rows[0].blamed:  # not blamed: the session's row was locked
        return NotNeeded()
    row = rows[0]
    if not row.equipped:
        return Unequipped(f"the agent {row.agent_wanted!r}", row.priority)
    if not row.free:
        return Queued()
    if row.token is None:
        return NeedsIsolation(row.claims_before, Fence(row.token_before, row.nonce_before), row.cancelled)
    tenure = Tenure(session_id, Fence(row.token, row.nonce), runtime.clock, limits.lease_s)
    tenure.renewed(asked_at)
    _read(tenure, row)
    tenure.alone, tenure.overdue = alone, row.overdue
    return tenure


def claim_patiently(
    runtime: Runtime, session_id: UUID, owner: str, *, alone: bool = False, agents: Sequence[str] | None = None
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
    try:
        _judge(database, session_id, limits, death_queries.BLAME)
    except Unavailable as error:  # a session is locked for long, or its lock waits for this one
        log.warning("a dead process's sessions are judged without the locked ones: %s", loggable(error))
        _judge(database, session_id, limits, death_queries.BLAME_UNLOCKED)


def _judge(database: Database, session_id: UUID, limits: TurnSettings, blame: Statement) -> None:
    with database.transaction("turns.blame") as transaction:
        transaction.run(death_queries.LOCK_DEATH, {"session_id": session_id})
        transaction.run(blame, {"session_id": session_id, "lease_s": limits.lease_s})


def read_again(database: Database, tenure: Tenure) -> None:
    """Bring `tenure` up to date: read the turn at hand again, or begin the next one if it is settled.

    Raises:
        LeaseLost: another worker has the session.
    """
    rows = database.run(queries.BEGIN_NEXT, {**tenure.fenced, "lease_s": tenure.lease_s})
    if not rows:
        raise LeaseLost
    _read(tenure, rows[0])


def _read(tenure: Tenure, row: Row[Any]) -> None:
    before, tenure.turn = tenure.turn, _turn(row)
    if before is None or tenure.turn is None or tenure.turn.turn_id != before.turn_id:
        tenure.spent(row.spent_s)
        tenure.overdue = False
    tenure.strikes, tenure.wakes, tenure.tick = row.strikes, row.wakes_before, row.tick
    tenure.variables_tick, tenure.variables = row.variables_tick, row.variables
    tenure.saved = None if row.saved_token is None else Version(row.saved_token, row.saved_tick)


def _turn(row: Row[Any]) -> TurnRow | None:
    if row.turn_id is None:
        return None
    return TurnRow(
        turn_id=row.turn_id,
        seq=row.seq,
        user_id=UserKey(row.user_id),
        agent=row.agent,
        channel=row.channel,
        first_seq=row.first_seq,
        cancel_requested_at=row.cancel_requested_at,
        before=Before(row.previous_channel, row.previous_session_id, row.previous_summary),
        verdict=row.unsaved,
        started_at=row.started_at,
        attempt_error=row.attempt_error,
        metadata=_metadata(row),
        may_overtake=getattr(row, "may_overtake", False),
    )


def _metadata(row: Row[Any]) -> dict[str, Any]:
    """The metadata of a turn; empty if this release cannot parse it."""
    try:
        return {} if row.metadata is None else load_object(row.metadata)
    except ValueError as error:
        log.warning("turn %s runs without its metadata, which cannot be parsed: %s", row.turn_id, loggable(error))
        return {}
