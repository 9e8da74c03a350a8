"""Claiming a session. The claim raises the session's fence; every later commit of the turn requires this fence."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Database
from perdure.database.fencing import Fence
from perdure.errors import loggable
from perdure.settings import TurnSettings
from perdure.snapshots.store import Version
from perdure.text.untrusted import load_object
from perdure.turns.lease import death_queries, queries

log = logging.getLogger(__name__)

ISOLATE_FROM_CLAIM = 2
"""After this number of claims of a turn, only a dedicated process may claim it."""

_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Before:
    """The previous turn's channel, and the id and summary of the user's previous session, if any."""

    channel: str | None = None
    session_id: UUID | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class TurnRef:
    """The turn that a claim began or took over."""

    turn_id: UUID
    seq: int
    user_id: str
    agent: str
    channel: str
    first_seq: int
    cancel_requested_at: datetime | None
    before: Before = Before()
    held: str | None = None
    """The outcome, as JSON, of a turn that has ended but is not settled until its snapshot is saved. None: the turn has
    not ended."""
    started_at: datetime | None = None
    attempt_error: str | None = None
    """The error of the last failed attempt."""
    may_overtake: bool = False
    """Whether other turns may wait for this turn's model."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The message's metadata."""

    @property
    def language(self) -> str | None:
        """The language in the message's metadata."""
        found = self.metadata.get("language")
        return found if isinstance(found, str) else None

    def own_metadata(self) -> dict[str, Any]:
        """A copy of the metadata for a function of the agent, which may change it."""
        return copy.deepcopy(dict(self.metadata))


@dataclass(frozen=True, slots=True)
class Kept:
    """A session's state between its turns.

    Attributes:
        tick: The number of the session's committed steps.
        variables_tick: The tick at which the working variables were last changed. None: there are no variables.
        variables: The working variables, as JSON. None: there are no variables, or a concurrent transaction committed
            them too late for the claim's statement to see them.
        saved: The version of the session's valid snapshot.
        wakes: The number of wake-ups since the last claim.
    """

    tick: int = 0
    variables_tick: int | None = None
    variables: str | None = None
    saved: Version | None = None
    wakes: int = 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """The session is held under `fence`.

    `turn` is `None` if a concurrent commit settled the last turn, or if no turn may begin because the intake is closed.
    """

    session_id: UUID
    fence: Fence
    strikes: int
    spent_s: float
    turn: TurnRef | None
    kept: Kept = Kept()
    overdue: bool = False
    """The turn has waited long enough for a worker that has its agent and tools: it fails if this worker lacks them."""

    @property
    def token(self) -> int:
        """The fence's token. A later claim has a higher token."""
        return self.fence.token


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


Claim = Claimed | NotNeeded | NeedsIsolation | Queued | Unequipped


class LeaseLost(Exception):
    """Another worker has the session: the caller must stop and write nothing."""


def claim(
    database: Database,
    session_id: UUID,
    owner: str,
    limits: TurnSettings,
    *,
    alone: bool = False,
    agents: Sequence[str] | None = None,
) -> Claim:
    """Take a session's lease if it is free, and begin the session's oldest unsettled turn.

    `alone` tells that this process runs only this session, so it may claim a turn that needs isolation. A turn that is
    out of attempts does not run, it is only settled: any process may claim it. `agents` names the agents whose turns
    this process can run; `None`: all.

    If the session's last holder has died, the death is first charged to one of the turns that the holder ran.
    """
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
    fence = Fence(row.token, row.nonce)
    return Claimed(session_id, fence, row.strikes, row.spent_s, _turn(row), _kept(row), row.overdue)


def _blame(database: Database, session_id: UUID, limits: TurnSettings) -> None:
    """Charge the death of the process that holds the session's expired lease to one of its turns."""
    with database.transaction("turns.blame") as transaction:
        transaction.run(death_queries.LOCK_DEATH, {"session_id": session_id})
        transaction.run(death_queries.BLAME, {"session_id": session_id, "lease_s": limits.lease_s})


def begin_next(database: Database, session_id: UUID, fence: Fence, limits: TurnSettings) -> Claimed:
    """Begin or continue the oldest unsettled turn of a session that is held under `fence`.

    Raises:
        LeaseLost: another worker has the session.
    """
    rows = database.run(queries.BEGIN_NEXT, {**fence.on(session_id), "lease_s": limits.lease_s})
    if not rows:
        raise LeaseLost
    row = rows[0]
    return Claimed(session_id, fence, row.strikes, row.spent_s, _turn(row), _kept(row))


def is_claimable(database: Database, session_id: UUID, limits: TurnSettings) -> bool:
    """Whether a session can be claimed.

    If a session can be claimed, but `claim` has just returned `NotNeeded`, the session's row was locked during `claim`.
    """
    rows = database.run(queries.CLAIMABLE, {"session_id": session_id, "lease_s": limits.lease_s})
    return bool(rows and rows[0].claimable)


def _turn(row: Row[Any]) -> TurnRef | None:
    if row.turn_id is None:
        return None
    return TurnRef(
        turn_id=row.turn_id,
        seq=row.seq,
        user_id=row.user_id,
        agent=row.agent,
        channel=row.channel,
        first_seq=row.first_seq,
        cancel_requested_at=row.cancel_requested_at,
        before=Before(row.previous_channel, row.previous_session_id, row.previous_summary),
        held=row.held,
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


def _kept(row: Row[Any]) -> Kept:
    saved = None if row.saved_token is None else Version(row.saved_token, row.saved_tick)
    return Kept(row.tick, row.variables_tick, row.variables, saved, row.wakes_before)
