"""Merges the candidates of one session into the user's memories, in one transaction.

The date of a candidate is the time of its latest source message. A candidate is compared with near memories that are
valid now or were still valid at its date (`judging`). Memories that are no longer valid are included because sessions
are consolidated in any order. If one of the compared memories is the same as the candidate, that memory is reinforced.
Otherwise, the candidate is stored as a new memory, which contradicts the memories that it changes. Of two contradicting
memories, the memory with the later date is valid from that date. The memory with the earlier date stays as history,
with the interval in which it was valid. A candidate that was over before it was said ends a memory only by denying it,
and one that holds from a day to come ends a memory on that day. A quotation is only stored; it is the same as nothing
and changes nothing.

A lock on the user serialises the merges of all sessions of the user, so that a fact from two sessions is stored once.
The transaction first checks the session's fencing token, so that a process that has lost its lease writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Database, Executor, as_json
from perdure.ids import new_id
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.candidates import Candidate, Decision, comparison_key
from perdure.memory.consolidation.judging import Pair, Settled, Topic, guard, settle
from perdure.memory.embedding import register, vector_literal
from perdure.models.embedders.protocol import Vector
from perdure.settings import ConsolidationSettings
from perdure.text.reading import read
from perdure.text.statements import Relation

log = logging.getLogger(__name__)

MOST_NEAR = 10
"""The most memories near a candidate by vectors, by words, and by the same attribute."""

QUOTATION_KIND = "conversation"
"""The kind of a memory that quotes a text and claims nothing. It decays fastest."""

_LOCK_TIMEOUT = "30s"
_USER = "user"


@dataclass(frozen=True, slots=True)
class EmbeddedCandidate:
    """A candidate with its vector, the time of its latest source and the channels of its sources.

    `known_id`: the memory that the model's decision is about.
    """

    candidate: Candidate
    vector: Vector
    said_at: datetime
    channels: tuple[str, ...]
    known_id: UUID | None = None

    @property
    def topic(self) -> Topic:
        if self.candidate.is_quotation:
            return Topic()
        return Topic.of(self.candidate.content, self.candidate.subject, self.candidate.attribute)

    @property
    def ended_at(self) -> datetime | None:
        """When it ceased to hold, if that was before it was said."""
        until = self.candidate.until
        return until if until is not None and until <= self.said_at else None

    def may_end(self, row: Any, decision: Decision | None) -> bool:
        """Whether it can end a memory: it holds still, is an end itself, or ceased to hold after the memory began."""
        if self.ended_at is None or decision is Decision.ENDS or read(self.candidate.content).is_over:
            return True
        return decision is Decision.CHANGES and bool(row.valid_from < self.ended_at)


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """Counts of memories stored, of candidates that reinforced a memory, and of memories superseded.

    `disputed`: comparisons in which the model and the judge disagreed.
    """

    stored: int = 0
    duplicates_merged: int = 0
    superseded: int = 0
    disputed: int = 0

    def __add__(self, other: MergeCounts) -> MergeCounts:
        return MergeCounts(
            self.stored + other.stored,
            self.duplicates_merged + other.duplicates_merged,
            self.superseded + other.superseded,
            self.disputed + other.disputed,
        )

    def as_outcome(self) -> dict[str, int]:
        """What a session's row records."""
        counts = asdict(self)
        return counts if self.disputed else {name: count for name, count in counts.items() if name != "disputed"}


Judged = Mapping[tuple[str, UUID], Relation]
"""What the judge said of a candidate's content and a memory. The rules decide about all other pairs."""


def near(executor: Executor, user_id: UserKey, embedder_id: int, found: EmbeddedCandidate) -> Sequence[Any]:
    """The memories near a candidate, as rows of `queries.SIMILAR`; a quotation has none but its equals."""
    topic = found.topic
    rows = executor.run(
        queries.SIMILAR,
        {
            "user_id": user_id,
            "embedder_id": embedder_id,
            "content": found.candidate.content,
            "vector": vector_literal(found.vector),
            "said_at": found.said_at,
            "subject": topic.subject,
            "attribute": topic.attribute,
            "named": [] if found.known_id is None else [found.known_id],
            "most": MOST_NEAR,
        },
    )
    if found.candidate.is_quotation:
        return [row for row in rows if row.content == found.candidate.content]
    return [row for row in rows if row.kind != QUOTATION_KIND]


@dataclass(frozen=True, slots=True)
class Merger:
    """Merges the candidates of one session in the caller's transaction.

    `stored`: the memories that it has stored. The model was not shown them, so its decisions are not about them.
    """

    executor: Executor
    clock: Clock
    session_id: UUID
    user_id: UserKey
    embedder_id: int
    limits: ConsolidationSettings
    judged: Judged
    stored: set[UUID] = field(default_factory=set)

    def add(self, found: EmbeddedCandidate) -> MergeCounts:
        """Reinforce an equivalent memory, or store the candidate as a memory (see the module's docstring)."""
        vector = vector_literal(found.vector)
        rows = near(self.executor, self.user_id, self.embedder_id, found)
        settled = [(row, self._settle(row, found)) for row in rows]
        disputed = MergeCounts(disputed=sum(each.disputed for _, each in settled))
        same = next((row for row, each in settled if each.relation is Relation.SAME), None)
        if same is not None:
            self._reinforce(same.memory_id, found)
            return disputed + MergeCounts(duplicates_merged=1)
        candidate = found.candidate
        begins = min(candidate.since or found.said_at, found.said_at)
        ended = found.ended_at
        holding = [row for row, each in settled if each.relation is Relation.CHANGES and row.holds]
        newest = max(holding, key=lambda row: row.last_said_at, default=None)
        if newest is None or found.said_at >= newest.last_said_at:
            memory_id = self._store(found, vector, valid_from=min(begins, ended or begins), valid_to=ended)
            self._supersede([row.memory_id for row in holding], memory_id, ended or candidate.since or begins)
            return disputed + MergeCounts(stored=1, superseded=len(holding))
        until = newest.valid_from if newest.valid_from > found.said_at else newest.last_said_at
        self._store(found, vector, valid_from=begins, valid_to=until, superseded_by=newest.memory_id)
        return disputed + MergeCounts(stored=1, superseded=1)

    def _settle(self, row: Any, found: EmbeddedCandidate) -> Settled:
        pair = Pair(row.content, found.candidate.content, row.similarity)
        judged = guard(pair, self.limits.similarity)
        if judged is Relation.UNKNOWN:
            judged = self.judged.get((found.candidate.content, row.memory_id), judged)
        topics = Topic(row.subject or "", row.attribute or ""), found.topic
        is_named = row.memory_id == found.known_id
        decision = None if row.memory_id in self.stored else found.candidate.decision
        settled = settle(pair, judged, decision, topics, is_named=is_named)
        if settled.relation is Relation.CHANGES and not found.may_end(row, decision if is_named else None):
            settled = Settled(Relation.UNKNOWN, settled.disputed)
        if settled.disputed:
            log.info(
                "session %s, memory %s: the model says %s, the judge %s, so it is %s",
                self.session_id, row.memory_id, decision, judged, settled.relation,
            )  # fmt: skip
        return settled

    def _reinforce(self, memory_id: UUID, found: EmbeddedCandidate) -> None:
        gain = {"memory_id": memory_id, "boost": self.limits.importance_boost, "channels": list(found.channels)}
        self.executor.run(queries.REINFORCE, gain)
        self._link(memory_id, found.candidate)

    def _supersede(self, memory_ids: Sequence[UUID], by: UUID, at: datetime) -> None:
        if memory_ids:
            self.executor.run(queries.SUPERSEDE, {"memory_ids": list(memory_ids), "by": by, "at": at})

    def _store(
        self,
        found: EmbeddedCandidate,
        vector: str,
        *,
        valid_from: datetime,
        valid_to: datetime | None,
        superseded_by: UUID | None = None,
    ) -> UUID:
        memory_id = new_id(self.clock)
        topic = found.topic
        stored = {
            "memory_id": memory_id,
            "user_id": self.user_id,
            "kind": QUOTATION_KIND if found.candidate.is_quotation else found.candidate.kind,
            "content": found.candidate.content,
            "importance": found.candidate.importance,
            "channels": list(found.channels),
            "session_id": self.session_id,
            "valid_from": valid_from,
            "valid_to": valid_to,
            "superseded_by": superseded_by,
            "subject": topic.subject or None,
            "attribute": topic.attribute or None,
            "embedder_id": self.embedder_id,
            "vector": vector,
        }
        self.executor.run(queries.STORE, stored)
        self.stored.add(memory_id)
        self._link(memory_id, found.candidate)
        return memory_id

    def _link(self, memory_id: UUID, candidate: Candidate) -> None:
        """Store the memory's source messages, entities and relations."""
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
        """Insert the candidate's entities in the order of their keys, to avoid deadlocks; returns their ids by key."""
        ends = [name for each in candidate.relations for name in (each.subject, each.object)]
        named: dict[str, tuple[str, str | None]] = {entity_key(name): (name, _kind_of(name)) for name in ends}
        named |= {entity_key(each.name): (each.name, each.kind) for each in candidate.entities}
        if not named:
            return {}
        keys = sorted(named)
        parameters: dict[str, Any] = {
            "user_id": self.user_id,
            "entity_ids": [new_id(self.clock) for _ in keys],
            "keys": keys,
            "names": [named[key][0] for key in keys],
            "kinds": [named[key][1] for key in keys],
        }
        return {row.key: row.entity_id for row in self.executor.run(queries.ADD_ENTITIES, parameters)}


def merge(
    database: Database,
    clock: Clock,
    fenced: dict[str, Any],
    *,
    user_id: UserKey,
    embedder: str,
    found: Sequence[EmbeddedCandidate],
    limits: ConsolidationSettings,
    judged: Judged,
) -> MergeCounts | None:
    """Merge a session's candidates and mark the session as consolidated.

    Returns `None` and writes nothing if the fencing token is stale or the user was erased.

    Raises:
        Unavailable: the database cannot be reached; the commit may or may not have happened.
    """
    embedder_id = register(database, embedder, len(found[0].vector)).embedder_id if found else 0
    with database.transaction("consolidation.merge") as transaction:
        transaction.run(queries.SET_LOCK_TIMEOUT, {"timeout": _LOCK_TIMEOUT})
        if not transaction.run(queries.CHECK_TOKEN, fenced) or not transaction.run(
            queries.LOCK_USER, {"user_id": user_id}
        ):
            return None
        # While the model worked, memories may have been forgotten, or the conversation left out of what is remembered.
        session = {"session_id": fenced["session_id"], "most_chars": 0}
        remembered = {row.seq for row in transaction.run(queries.CONVERSATION, session)}
        kept = [each for each in found if remembered.issuperset(each.candidate.sources)]
        merger = Merger(transaction, clock, fenced["session_id"], user_id, embedder_id, limits, judged)
        merged = sum(map(merger.add, kept), start=MergeCounts())
        transaction.run(queries.MARK, {**fenced, "outcome": as_json(merged.as_outcome())})
    return merged


def entity_key(name: str) -> str:
    """The key of an entity: its name's `comparison_key` without a possessive ending."""
    return comparison_key(name).removesuffix("'s")


def _kind_of(name: str) -> str | None:
    return _USER if entity_key(name) == _USER else None
