"""The memory tools of an agent: remember, recall and forget. They act on the memory of the turn's user.

An `OwnMemory` is bound to one tool call and so to one user: it cannot reach another user's memory. A new memory has the
`effect_id` of the tool call as its id. If the call is repeated after a crash, the memory is therefore stored only once.
Vectors are made before the transaction begins; if the embedder fails, `embed_missing` makes them later.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from perdure.access.tenants import UserKey
from perdure.database.engine import Database, Executor
from perdure.errors import InvalidRequest, PerdureError, ToolError, loggable
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.candidates import MemoryKind
from perdure.memory.consolidation.extraction import MESSAGE_CHARS, is_deceived, quotation, telling_words
from perdure.memory.consolidation.judging import Pair, Topic, guard
from perdure.memory.consolidation.merging import MOST_NEAR, QUOTATION_KIND
from perdure.memory.consolidation.reopening import current_near, reopen
from perdure.memory.embedding import register, vector_literal
from perdure.memory.recall import agent_memory_queries
from perdure.memory.recall.past_queries import RELATED_SESSIONS
from perdure.memory.recall.search import Recall, Recalled
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import ModelCall
from perdure.settings import ConsolidationSettings
from perdure.text.injections import MAX_CHARS as INSTRUCTIONS_CHARS
from perdure.text.injections import instructs
from perdure.text.statements import Relation

log = logging.getLogger(__name__)

_MOST_ALIKE = 1_000
"""The most messages that are compared with a forgotten memory."""

_MOST_SAID = 40
"""The newest messages in which `OwnMemory.remember` looks for instructions to a model."""

_REPEATED_SHARE = 2 / 3
"""A message repeats a memory if it has this fraction of the memory's words that carry meaning."""


@dataclass(frozen=True, slots=True)
class Means:
    """The dependencies that all `OwnMemory` objects share. `timeout_s` limits each call to the embedder."""

    recall: Recall
    limits: ConsolidationSettings
    timeout_s: float

    @property
    def database(self) -> Database:
        return self.recall.database


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """The memory operations of one tool call, for the user of that call.

    `zone`: the user's time zone, if it is known.
    """

    means: Means
    user_id: UserKey
    session_id: UUID
    turn_id: UUID
    effect_id: UUID
    channel: str
    zone: ZoneInfo | None = None

    def remember(self, content: str, kind: MemoryKind, importance: float) -> UUID:
        """Store a memory, with the user's messages of this turn as its sources; returns the memory's id.

        If an equivalent memory exists, adds the sources to that memory and returns its id. Otherwise the new memory
        supersedes the memories that it changes. While the embedder is unavailable, these are found by their words and
        topic. A content that gives instructions to a model, or that comes from a message or a tool's result that does,
        is stored as a quotation.

        Raises:
            InvalidRequest: the user was erased.
            ToolError: nothing of the turn may be remembered (`remember: false`).
        """
        embedder = self.means.recall.embedder
        vector = None if embedder is None else self._vector(embedder, content)
        is_quotation = instructs(content) or self._is_deceived(content)
        if is_quotation:
            content = quotation(content)
        topic = Topic() if is_quotation else Topic.of(content)
        parameters = {
            "user_id": self.user_id,
            "content": content,
            "said_at": self.means.recall.clock.now(),
            "subject": topic.subject,
            "attribute": topic.attribute,
        }
        with self.means.database.transaction("own.remember") as transaction:
            locked = {"session_id": self.session_id, "turn_id": self.turn_id, "user_id": self.user_id}
            sessions = transaction.run(agent_memory_queries.LOCK_SESSION, locked)
            if not sessions:
                raise InvalidRequest("The user was erased, so nothing can be remembered of them.")
            if not sessions[0].is_remembered:
                raise ToolError("Nothing was stored: the user wants nothing of this message to be remembered.")
            transaction.run(queries.LOCK_USER, locked)
            found = (
                _near(transaction, embedder.name, parameters, vector)
                if embedder and vector
                else current_near(transaction, self.user_id, content, topic)
            )
            related = {
                row.memory_id: guard(Pair(row.content, content, row.similarity), self.means.limits.similarity)
                for row in found
                if (row.kind != QUOTATION_KIND and not is_quotation) or row.content == content
            }
            same = next((each for each, relation in related.items() if relation is Relation.SAME), None)
            memory_id: UUID = same or self.effect_id
            if same is None:
                self._store(transaction, content, QUOTATION_KIND if is_quotation else kind, importance, topic)
                changed = [each for each, relation in related.items() if relation is Relation.CHANGES]
                self._supersede(transaction, changed)
            transaction.run(agent_memory_queries.ADD_TURN_SOURCES, {"memory_id": memory_id, "turn_id": self.turn_id})
        return memory_id

    def recall(self, query: str, k: int) -> Sequence[Recalled]:
        """The `k` most relevant messages and memories of the user, best first.

        Omits the messages of the other sessions in the fork tree of the turn's session.
        """
        exclude_sessions = [
            row.session_id for row in self.means.database.run(RELATED_SESSIONS, {"session_id": self.session_id})
        ]
        return self.means.recall.search(
            self.user_id, query, k, exclude_sessions=exclude_sessions, call=self._call(), zone=self.zone
        )

    def forget(self, memory_id: UUID) -> bool:
        return forget(self.means.database, self.user_id, memory_id, self.session_id)

    def _is_deceived(self, content: str) -> bool:
        """Whether a page, a mail or another text of the conversation told the model to remember this."""
        sought = {"session_id": self.session_id, "turn_id": self.turn_id, "user_id": self.user_id}
        limits = {"most": _MOST_SAID, "most_chars": INSTRUCTIONS_CHARS}
        rows = self.means.database.run(agent_memory_queries.NEWEST_SAID, {**sought, **limits})
        return is_deceived(content, {row.seq for row in rows if row.is_source}, rows)

    def _call(self) -> ModelCall:
        return ModelCall(self.means.recall.clock, self.means.timeout_s)

    def _vector(self, embedder: Embedder, content: str) -> Vector | None:
        try:
            return embedder.embed([content], self._call())[0]
        except PerdureError as error:
            log.warning("a memory is stored without a vector, which is made later: %s", loggable(error))
            return None

    def _store(self, executor: Executor, content: str, kind: str, importance: float, topic: Topic) -> None:
        stored = {
            "memory_id": self.effect_id,
            "user_id": self.user_id,
            "kind": kind,
            "content": content,
            "importance": importance,
            "channel": self.channel,
            "session_id": self.session_id,
            "subject": topic.subject or None,
            "attribute": topic.attribute or None,
        }
        executor.run(agent_memory_queries.REMEMBER, stored)

    def _supersede(self, executor: Executor, memory_ids: list[UUID]) -> None:
        if memory_ids:
            parameters = {"memory_ids": memory_ids, "by": self.effect_id, "at": self.means.recall.clock.now()}
            executor.run(queries.SUPERSEDE, parameters)


def forget(database: Database, user_id: UserKey, memory_id: UUID, session_id: UUID | None = None) -> bool:
    """Erase one memory, and the entities that only this memory mentions; returns whether the memory existed.

    What it had superseded is superseded by its successor, or holds again (`consolidation.reopening`). No memory is
    extracted again from its sources, nor from other messages of their sessions, or of `session_id`, that say the same.
    """
    with database.transaction("own.forget") as transaction:
        # A consolidation of the same messages sees what is forgotten, or has stored before.
        transaction.run(queries.LOCK_USER, {"user_id": user_id})
        return forget_within(transaction, user_id, memory_id, session_id)


def forget_within(executor: Executor, user_id: UserKey, memory_id: UUID, session_id: UUID | None = None) -> bool:
    """`forget` in the caller's transaction, which has locked the user."""
    memory = {"memory_id": memory_id, "user_id": user_id}
    mentioned = [row.entity_id for row in executor.run(agent_memory_queries.MENTIONED_ENTITIES, memory)]
    executor.run(agent_memory_queries.HAND_OVER, memory)
    reopen(executor, user_id, memory_id)
    _mark_repetitions(executor, memory, session_id)
    existed = bool(executor.run(agent_memory_queries.FORGET, memory))
    executor.run(agent_memory_queries.FORGET_ENTITIES, {"entity_ids": mentioned, "user_id": user_id})
    return existed


def _mark_repetitions(executor: Executor, memory: dict[str, Any], session_id: UUID | None) -> None:
    """Mark the messages that have most of the memory's words, as those have that a tool's memory repeats."""
    sought = {**memory, "session_id": session_id, "most": _MOST_ALIKE, "most_chars": MESSAGE_CHARS}
    rows = executor.run(agent_memory_queries.ALIKE, sought)
    repeating = [row for row in rows if _repeats(row.content, row.memory)]
    if repeating:
        marked = {"session_ids": [row.session_id for row in repeating], "seqs": [row.seq for row in repeating]}
        executor.run(agent_memory_queries.MARK_FORGOTTEN, marked)


def _repeats(said: str, memory: str) -> bool:
    wanted = telling_words(memory)
    return len(wanted & telling_words(said)) >= _REPEATED_SHARE * len(wanted) > 0


def _near(executor: Executor, embedder: str, parameters: dict[str, Any], vector: Vector) -> Sequence[Any]:
    """The user's current memories near a content (`queries.SIMILAR`), nearest first."""
    registered = register(executor, embedder, len(vector))
    nearest = {"embedder_id": registered.embedder_id, "vector": vector_literal(vector), "most": MOST_NEAR}
    return executor.run(queries.SIMILAR, {**parameters, **nearest, "named": []})
