"""What an agent may do with the memory of the user it talks to, by itself: remember, recall, forget.

Bound to one call of a tool, and so to one user: there is no way from here to anybody else's. What
is remembered has the id of the call's effect, so that a call that is repeated after a crash
remembers once. Vectors are made before a transaction begins; without an embedder they follow later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from perdure.database.engine import Database, Executor
from perdure.errors import InvalidRequest, PerdureError, loggable
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.candidates import MemoryKind
from perdure.memory.embedding import register, vector_literal
from perdure.memory.recall import agent_memory_queries
from perdure.memory.recall.search import Recall, Recalled
from perdure.memory.sections.queries import RELATED_SESSIONS
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import ModelCall
from perdure.settings import ConsolidationSettings
from perdure.text.contradiction import difference

log = logging.getLogger(__name__)

_MOST_SIMILAR = 10


@dataclass(frozen=True, slots=True)
class Means:
    """What it takes, whosever memory it is. An embedder is waited for no longer than `timeout_s`."""

    recall: Recall
    limits: ConsolidationSettings
    timeout_s: float

    @property
    def database(self) -> Database:
        """Where it is kept."""
        return self.recall.database


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """The memory of the user on whose behalf a tool runs."""

    means: Means
    user_id: str
    session_id: UUID
    turn_id: UUID
    effect_id: UUID
    channel: str

    def remember(self, content: str, kind: MemoryKind, importance: float) -> UUID:
        """Keep a memory, with what the user said in this turn as its source; the memory's id.

        One that says the same already stays alone; one that says otherwise is superseded.

        Raises:
            InvalidRequest: the user was erased meanwhile.
            Unavailable: the database cannot be reached.
        """
        embedder = self.means.recall.embedder
        vector = None if embedder is None else self._vector(embedder, content)
        similar = {
            "user_id": self.user_id,
            "content": content,
            "threshold": self.means.limits.similarity,
            "said_at": self.means.recall.clock.now(),
        }
        with self.means.database.transaction("own.remember") as transaction:
            known = {"session_id": self.session_id, "user_id": self.user_id}
            if not transaction.run(agent_memory_queries.LOCK_SESSION, known):
                raise InvalidRequest("There is nobody to remember this of any more.")
            transaction.run(queries.LOCK_USER, known)
            found = _similar(transaction, embedder.name, similar, vector) if embedder and vector else ()
            same = next((row.memory_id for row in found if difference(row.content, content) is None), None)
            memory_id: UUID = same or self.effect_id
            if same is None:
                self._store(transaction, content, kind, importance)
                self._supersede(transaction, [row.memory_id for row in found])
            transaction.run(agent_memory_queries.FROM_TURN, {"memory_id": memory_id, "turn_id": self.turn_id})
        return memory_id

    def recall(self, query: str, k: int) -> Sequence[Recalled]:
        """What is known of the user, and what was said, that bears on `query`; the best first, at most `k`.

        What was said in a session that shares its beginning with this one is left out.

        Raises:
            Unavailable: the database cannot be reached.
        """
        kin = [row.session_id for row in self.means.database.run(RELATED_SESSIONS, {"session_id": self.session_id})]
        return self.means.recall.search(self.user_id, query, k, kin=kin, call=self._call())

    def forget(self, memory_id: UUID) -> bool:
        """Erase a memory of this user; whether it was there. See `forget`."""
        return forget(self.means.database, self.user_id, memory_id)

    def _call(self) -> ModelCall:
        return ModelCall(self.means.recall.clock, self.means.timeout_s)

    def _vector(self, embedder: Embedder, content: str) -> Vector | None:
        try:
            return embedder.embed([content], self._call())[0]
        except PerdureError as error:
            log.warning("a memory is kept without its vector for now: %s", loggable(error))
            return None

    def _store(self, executor: Executor, content: str, kind: MemoryKind, importance: float) -> None:
        stored = {
            "memory_id": self.effect_id,
            "user_id": self.user_id,
            "kind": kind,
            "content": content,
            "importance": importance,
            "channel": self.channel,
            "session_id": self.session_id,
        }
        executor.run(agent_memory_queries.REMEMBER, stored)

    def _supersede(self, executor: Executor, memory_ids: list[UUID]) -> None:
        if memory_ids:
            given = {"memory_ids": memory_ids, "by": self.effect_id, "said_at": self.means.recall.clock.now()}
            executor.run(queries.SUPERSEDE, given)


def forget(database: Database, user_id: str, memory_id: UUID) -> bool:
    """Erase a memory of a user, and whatever only it had named; whether it was there.

    Raises:
        Unavailable: the database cannot be reached.
    """
    asked = {"memory_id": memory_id, "user_id": user_id}
    with database.transaction("own.forget") as transaction:
        named = [row.entity_id for row in transaction.run(agent_memory_queries.NAMED, asked)]
        gone = bool(transaction.run(agent_memory_queries.FORGET, asked))
        transaction.run(agent_memory_queries.FORGET_NAMED, {"entity_ids": named, "user_id": user_id})
    return gone


def _similar(executor: Executor, embedder: str, asked: dict[str, Any], vector: Vector) -> Sequence[Any]:
    """The user's memories that hold and are nearer than the threshold, the nearest first."""
    known = register(executor, embedder, len(vector))
    by = {"embedder_id": known.embedder_id, "vector": vector_literal(vector), "most": _MOST_SIMILAR}
    return executor.run(queries.SIMILAR, {**asked, **by})
