"""What every store of snapshots does, and what its failures are called.

    Conflict
    └── StaleSnapshot          a newer snapshot is stored already
    Unavailable
    └── SnapshotUnavailable    the store is full, read-only, damaged or away

The law that every store keeps: a snapshot is saved whole or not at all, it is durable (as far
as the store can promise it) when `save` returns, and one of a lower version never takes the
place of one of a higher version, whoever is paused or killed at whatever moment. What is
stored and cannot be read is set aside for the operator, reported, and then counts as absent:
PostgreSQL is the truth, and what is lost here is built again from it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from perdure.errors import Conflict, InvalidRequest, TooLarge, Unavailable
from perdure.snapshots.codec import parse
from perdure.snapshots.snapshot import LIMIT, AgentSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Which of two snapshots of an agent is the newer: by fencing token, then by tick."""

    token: int
    tick: int

    def __str__(self) -> str:
        return f"token {self.token}, tick {self.tick}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot as a store gives it back, with the fencing token it was saved under."""

    snapshot: AgentSnapshot
    token: int

    @property
    def version(self) -> Version:
        """Its place in the order of the agent's snapshots."""
        return Version(self.token, self.snapshot.tick_index)


class StaleSnapshot(Conflict):
    """A newer snapshot of the agent is stored: whoever saved this one has lost the session."""

    def __init__(self, agent_id: UUID, offered: Version, stored: Version) -> None:
        super().__init__(f"The snapshot of {agent_id} at {offered} is older than the one stored, at {stored}.")
        self.offered = offered
        self.stored = stored


class SnapshotUnavailable(Unavailable):
    """The store cannot be used now; what was under way may or may not have happened."""

    def __init__(self, store: str, what: str, way_out: str) -> None:
        super().__init__(f"The snapshot store {store} cannot be used: {what}. {way_out}")


class SnapshotStore(Protocol):
    """Where snapshots are kept. Threads share a store; a process that was forked makes its own.

    Each method answers, or raises `SnapshotUnavailable`, within about two seconds; PostgreSQL's has
    the bounds of the engine's own connections.
    """

    @property
    def name(self) -> str:
        """Which one it is, for messages and logs; without a password."""
        ...

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        """Store `snapshot`, taken under the fencing `token`, in place of an older one.

        Saving the same version again replaces it. It is safe to repeat a save that failed.

        Raises:
            StaleSnapshot: one of a higher (token, tick) is stored.
            InvalidRequest: it cannot be stored; the message says why.
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def load(self, agent_id: UUID) -> Stored | None:
        """The agent's newest snapshot, or None. One that cannot be read is set aside.

        Raises:
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        """Keep what is stored for the operator, if it is no newer than `upto`, out of `load`'s way.

        One is kept for each agent, the last; `reason` goes to the log.

        Raises:
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def delete(self, agent_id: UUID) -> None:
        """Forget the agent, what was set aside included. One that is not there is no error.

        Raises:
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def close(self) -> None:
        """Let go of connections and files. A store that is used again opens them again."""
        ...


def version_of(snapshot: AgentSnapshot, token: int) -> Version:
    """The version that `snapshot` has under `token`.

    Raises:
        InvalidRequest: no store could keep such a token.
    """
    if not 0 <= token < LIMIT:
        raise InvalidRequest(f"A fencing token is a whole number from 0 to below {LIMIT}, not {token}.")
    return Version(token, snapshot.tick_index)


def refuse_stale(agent_id: UUID, offered: Version, stored: Version | None) -> None:
    """Nothing, if `offered` may take the place of `stored`.

    Raises:
        StaleSnapshot: it is older.
    """
    if stored is not None and offered < stored:
        raise StaleSnapshot(agent_id, offered, stored)


def restored(data: bytes, agent_id: UUID, version: Version) -> Stored:
    """The snapshot of `agent_id` that was stored as `data`, under a name or key that says `version`.

    Raises:
        InvalidRequest: it is damaged, or something else; the message says what.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The snapshot cannot be read: it is not UTF-8 at byte {error.start}.") from error
    try:
        snapshot = parse(text, agent_id)
    except TooLarge as error:
        raise InvalidRequest(error.message) from error
    if snapshot.tick_index != version.tick:
        raise InvalidRequest(f"The snapshot is of tick {snapshot.tick_index} and stored as one of tick {version.tick}.")
    return Stored(snapshot, version.token)


def report_set_aside(store: str, agent_id: UUID, kept_as: str, reason: str) -> None:
    """Tell the operator that a snapshot does not count, why, and where it is now."""
    log.error("the snapshot of session %s in %s was set aside as %s: %s", agent_id, store, kept_as, reason)
