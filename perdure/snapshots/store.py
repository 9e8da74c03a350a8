"""The protocol of snapshot stores, and their errors.

    Conflict
    └── StaleSnapshot          a newer snapshot is stored
    Unavailable
    └── SnapshotUnavailable    the store is full, read-only, damaged or unavailable

Every store keeps these invariants, even if writers are paused or killed at any moment:

- `save` is atomic.
- When `save` returns, the snapshot is durable, as far as the store supports durability.
- A lower version never replaces a higher version.

If a store cannot read a snapshot, it sets the snapshot aside: it logs an error, and keeps the snapshot where an
operator can inspect it. From then on, `load` ignores the snapshot, and the engine rebuilds it from PostgreSQL.
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
    """The version of a snapshot. Versions are ordered by fencing token, then by tick."""

    token: int
    tick: int

    def __str__(self) -> str:
        return f"token {self.token}, tick {self.tick}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored snapshot, with the fencing token under which it was saved."""

    snapshot: AgentSnapshot
    token: int

    @property
    def version(self) -> Version:
        return Version(self.token, self.snapshot.tick_index)


class StaleSnapshot(Conflict):
    """A newer snapshot of the agent is stored, usually because another worker has claimed the session."""

    def __init__(self, agent_id: UUID, offered: Version, stored: Version) -> None:
        super().__init__(f"The snapshot of {agent_id} at {offered} is older than the one stored, at {stored}.")
        self.offered = offered
        self.stored = stored


class SnapshotUnavailable(Unavailable):
    """The store cannot be used now; the operation may or may not have taken effect."""

    def __init__(self, store: str, what: str, remedy: str) -> None:
        super().__init__(f"The snapshot store {store} cannot be used: {what}. {remedy}")


class SnapshotStore(Protocol):
    """Stores snapshots. Threads may share a store; a forked process must open its own store.

    Each method should return, or raise `SnapshotUnavailable`, within about two seconds. The PostgreSQL store has
    the timeouts of the engine's connections instead.
    """

    @property
    def name(self) -> str:
        """The store's name for messages and logs, without a password."""
        ...

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        """Store `snapshot`, which was made under the fencing token `token`.

        Replaces a stored snapshot of an older or the same version. It is safe to repeat a save that failed.

        Raises:
            StaleSnapshot: a snapshot with a higher version is stored.
            InvalidRequest: the snapshot cannot be stored; the message says why.
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def load(self, agent_id: UUID) -> Stored | None:
        """The agent's newest snapshot, or `None`. Sets a snapshot aside if it cannot be read.

        Raises:
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        """Set the stored snapshot aside, unless it is newer than `upto`, and log `reason`.

        `load` then ignores the snapshot, but an operator can inspect it. For each agent, the store keeps only the
        latest snapshot that it set aside.

        Raises:
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def delete(self, agent_id: UUID) -> None:
        """Delete the agent's snapshots, including any that was set aside. Idempotent.

        Raises:
            SnapshotUnavailable: the store cannot be used.
        """
        ...

    def close(self) -> None:
        """Close connections and files. The next use opens them again."""
        ...


def version_of(snapshot: AgentSnapshot, token: int) -> Version:
    """The version of `snapshot` under `token`.

    Raises:
        InvalidRequest: `token` is out of range.
    """
    if not 0 <= token < LIMIT:
        raise InvalidRequest(f"A fencing token is a whole number from 0 to below {LIMIT}, not {token}.")
    return Version(token, snapshot.tick_index)


def refuse_stale(agent_id: UUID, offered: Version, stored: Version | None) -> None:
    """Check that `offered` may replace `stored`.

    Raises:
        StaleSnapshot: `offered` is older than `stored`.
    """
    if stored is not None and offered < stored:
        raise StaleSnapshot(agent_id, offered, stored)


def parse_stored(data: bytes, agent_id: UUID, version: Version) -> Stored:
    """Parse `data`, the snapshot that a store holds for `agent_id` under `version`.

    Raises:
        InvalidRequest: the data is damaged, or does not match `agent_id` or `version`.
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
    log.error("the snapshot of session %s in %s was set aside as %s: %s", agent_id, store, kept_as, reason)
