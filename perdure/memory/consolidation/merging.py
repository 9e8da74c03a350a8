"""Merging what a session brought into what is known of its user: one transaction, all of it or nothing.

Near enough to a memory that holds (or that held then: sessions come in any order), and not against
it, it is the same said again: that memory gains.
Near and against it, the one that was said later holds from then on, and the other stays as history
with the time for which it held. A lock on the user lets one session after another do this, so that
a fact told in two sessions at once is stored once; the session's token is checked first, so that
whoever lost it writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database, Executor, as_json
from perdure.ids import new_id
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.candidates import Candidate, comparison_key
from perdure.memory.embedding import register, vector_literal
from perdure.models.embedders.protocol import Vector
from perdure.settings import ConsolidationSettings
from perdure.text.contradiction import difference

_LOCK_TIMEOUT = "30s"
_MOST_SIMILAR = 10
_USER = "user"


@dataclass(frozen=True, slots=True)
class EmbeddedCandidate:
    """A candidate with its vector, when the last of its sources was said, and on which channels they were."""

    candidate: Candidate
    vector: Vector
    said_at: datetime
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """Memories that a session brought: new ones, those known already, those that others have replaced."""

    stored: int = 0
    duplicates_merged: int = 0
    superseded: int = 0

    def __add__(self, other: MergeCounts) -> MergeCounts:
        return MergeCounts(
            self.stored + other.stored,
            self.duplicates_merged + other.duplicates_merged,
            self.superseded + other.superseded,
        )


@dataclass(frozen=True, slots=True)
class Merger:
    """Merges the memories of one session, in a transaction of somebody else's."""

    executor: Executor
    clock: Clock
    session_id: UUID
    user_id: str
    embedder_id: int
    limits: ConsolidationSettings

    def add(self, found: EmbeddedCandidate) -> MergeCounts:
        """Reinforce, supersede or store."""
        vector = vector_literal(found.vector)
        asked: dict[str, Any] = {
            "user_id": self.user_id,
            "embedder_id": self.embedder_id,
            "content": found.candidate.content,
        }
        asked |= {"vector": vector, "threshold": self.limits.similarity, "most": _MOST_SIMILAR}
        similar = self.executor.run(queries.SIMILAR, {**asked, "said_at": found.said_at})
        same = next((row for row in similar if difference(row.content, found.candidate.content) is None), None)
        if same is not None:
            self._reinforce(same.memory_id, found)
            return MergeCounts(duplicates_merged=1)
        holding = [row for row in similar if row.holds]
        newest = max(holding, key=lambda row: row.last_said_at, default=None)
        if newest is None or found.said_at >= newest.last_said_at:
            memory_id = self._store(found, vector)
            self._supersede([row.memory_id for row in holding], memory_id, found.said_at)
            return MergeCounts(stored=1, superseded=len(holding))
        until = newest.valid_from if newest.valid_from > found.said_at else newest.last_said_at
        self._store(found, vector, valid_to=until, superseded_by=newest.memory_id)
        return MergeCounts(stored=1, superseded=1)

    def _reinforce(self, memory_id: UUID, found: EmbeddedCandidate) -> None:
        gain = {"memory_id": memory_id, "boost": self.limits.importance_boost, "channels": list(found.channels)}
        self.executor.run(queries.REINFORCE, gain)
        self._link(memory_id, found.candidate)

    def _supersede(self, memory_ids: Sequence[UUID], by: UUID, said_at: datetime) -> None:
        if memory_ids:
            self.executor.run(queries.SUPERSEDE, {"memory_ids": list(memory_ids), "by": by, "said_at": said_at})

    def _store(
        self, found: EmbeddedCandidate, vector: str, valid_to: datetime | None = None, superseded_by: UUID | None = None
    ) -> UUID:
        memory_id = new_id(self.clock)
        stored = {
            "memory_id": memory_id,
            "user_id": self.user_id,
            "kind": found.candidate.kind,
            "content": found.candidate.content,
            "importance": found.candidate.importance,
            "channels": list(found.channels),
            "session_id": self.session_id,
            "said_at": found.said_at,
            "valid_to": valid_to,
            "superseded_by": superseded_by,
            "embedder_id": self.embedder_id,
            "vector": vector,
        }
        self.executor.run(queries.STORE, stored)
        self._link(memory_id, found.candidate)
        return memory_id

    def _link(self, memory_id: UUID, candidate: Candidate) -> None:
        """Note the messages that the memory came from, whom and what it is about, and how they belong together."""
        sources = {"memory_id": memory_id, "session_id": self.session_id, "seqs": list(candidate.sources)}
        self.executor.run(queries.ADD_SOURCES, sources)
        ids = self._entities(candidate)
        if not ids:
            return
        mentioned = {"memory_id": memory_id, "entity_ids": list(ids.values())}
        self.executor.run(queries.MENTION, mentioned)
        if candidate.relations:
            related = {
                "memory_id": memory_id,
                "user_id": self.user_id,
                "source_ids": [ids[entity_key(each.subject)] for each in candidate.relations],
                "predicates": [each.relation for each in candidate.relations],
                "target_ids": [ids[entity_key(each.object)] for each in candidate.relations],
            }
            self.executor.run(queries.RELATE, related)

    def _entities(self, candidate: Candidate) -> dict[str, UUID]:
        """The ids of all that the candidate names, by their keys; in one order, so that two writers never cross."""
        ends = [name for each in candidate.relations for name in (each.subject, each.object)]
        named: dict[str, tuple[str, str | None]] = {entity_key(name): (name, _kind_of(name)) for name in ends}
        named |= {entity_key(each.name): (each.name, each.kind) for each in candidate.entities}
        if not named:
            return {}
        keys = sorted(named)
        given: dict[str, Any] = {
            "user_id": self.user_id,
            "entity_ids": [new_id(self.clock) for _ in keys],
            "keys": keys,
            "names": [named[key][0] for key in keys],
            "kinds": [named[key][1] for key in keys],
        }
        return {row.key: row.entity_id for row in self.executor.run(queries.ADD_ENTITIES, given)}


def merge(
    database: Database,
    clock: Clock,
    tenure: dict[str, Any],
    *,
    user_id: str,
    embedder: str,
    found: Sequence[EmbeddedCandidate],
    limits: ConsolidationSettings,
) -> MergeCounts | None:
    """Merge what a session brought and mark it as consolidated; None, with nothing written, if its token has moved on.

    Raises:
        Unavailable: the database cannot be reached; the commit may or may not have happened.
    """
    embedder_id = register(database, embedder, len(found[0].vector)).embedder_id if found else 0
    with database.transaction("consolidation.merge") as transaction:
        transaction.run(queries.SET_LOCK_TIMEOUT, {"timeout": _LOCK_TIMEOUT})
        if not transaction.run(queries.CHECK_TOKEN, tenure) or not transaction.run(
            queries.LOCK_USER, {"user_id": user_id}
        ):
            return None
        merger = Merger(transaction, clock, tenure["session_id"], user_id, embedder_id, limits)
        merged = sum(map(merger.add, found), start=MergeCounts())
        transaction.run(queries.MARK, {**tenure, "outcome": as_json(asdict(merged))})
    return merged


def entity_key(name: str) -> str:
    """The same for all spellings of a name that differ in case, width, blanks and possessive only."""
    return comparison_key(name).removesuffix("'s")


def _kind_of(name: str) -> str | None:
    return _USER if entity_key(name) == _USER else None
