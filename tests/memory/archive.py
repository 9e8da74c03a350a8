"""Adds ended sessions to a test's database, consolidates them and reads the resulting memories."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.database.fencing import Fence
from perdure.ids import new_id
from perdure.memory.consolidation.consolidate import Consolidator, LeaseHold
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Embedder, Vector, unit
from perdure.models.protocol import Model, ModelCall, ModelReply, ModelRequest
from perdure.settings import ConsolidationSettings
from perdure.turns.lease.keeper import Keeper
from tests.turns.harness import Harness
from tests.turns.scripted import says

LEASE_S = 30

LYON, PARIS, HOME = "I live in Lyon.", "I live in Paris.", "My home is in Lyon."
GROUPS = ((LYON, HOME, PARIS),)
"""Groups for `Grouped`: the texts of a group have nearly equal vectors."""

ENDED = """
    WITH known AS (
        INSERT INTO users (user_id, created_at) VALUES (%(user_id)s, perdure_now()) ON CONFLICT DO NOTHING
    ), ended AS (
        INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at,
                              channels, turn_count, message_count, ended_at, end_requested_at)
        VALUES (%(session_id)s, %(user_id)s, '', false, 'assistant', 'ended', perdure_now(), perdure_now(),
                ARRAY['cli'], %(turns)s, cardinality(%(contents)s), perdure_now(), perdure_now())
    ), turned AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, accepted_at, settled_at)
        SELECT gen_random_uuid(), %(session_id)s, seq, %(user_id)s, 'assistant', 'cli', 5, 'done', perdure_now(),
               perdure_now()
        FROM generate_series(1, %(turns)s) AS seq
    )
    INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, created_at)
    SELECT %(session_id)s, seq, gen_random_uuid(), role, content, %(channel)s, 1, perdure_now() + seq * interval '1 ms'
    FROM unnest(%(roles)s, %(contents)s) WITH ORDINALITY AS said (role, content, seq)
"""

KNOWN = """
    SELECT m.*, (SELECT count(*) FROM memory_vectors AS v WHERE v.memory_id = m.memory_id) AS vectors,
           ARRAY(SELECT s.seq FROM memory_sources AS s WHERE s.memory_id = m.memory_id ORDER BY s.session_id, s.seq)
               AS seqs,
           (SELECT b.content FROM memories AS b WHERE b.memory_id = m.superseded_by) AS replaced_by
    FROM memories AS m WHERE user_id = %(user_id)s ORDER BY valid_from, content
"""


class Grouped:
    """An embedder that gives all texts of a group nearly equal vectors.

    Vectors of different groups are nearly orthogonal. A text without a group gets its vector from `HashEmbedder`.
    """

    name = "grouped:64"
    dimensions = 64

    def __init__(self, *groups: Iterable[str]) -> None:
        self._groups = {text: number for number, group in enumerate(groups) for text in group}
        self.down: BaseException | None = None

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        if self.down is not None:
            raise self.down
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> Vector:
        number = self._groups.get(text)
        if number is None:
            return HashEmbedder(64).embed([text])[0]
        vector = [0.0] * 64
        vector[number], vector[63] = 1.0, 0.1 * (len(text) % 3)
        return unit(vector)


@dataclass
class Archive:
    """Adds ended sessions to a harness, and reads the memories of a user."""

    harness: Harness
    keeper: Keeper
    limits: ConsolidationSettings = field(default_factory=ConsolidationSettings)
    embedder: Embedder = field(default_factory=lambda: HashEmbedder(384))

    def ended(self, *lines: str | tuple[str, str], user_id: str = "ana", turns: int = 5, channel: str = "cli") -> UUID:
        """Add an ended session with a message for each of `lines`; returns the session's id.

        A plain string is a message of the user. A tuple is `(role, content)`.
        """
        said = [("user", line) if isinstance(line, str) else line for line in lines]
        session_id = new_id(self.harness.clock)
        self.harness.sql(
            ENDED,
            session_id=session_id,
            user_id=user_id,
            turns=turns,
            channel=channel,
            roles=[role for role, _ in said],
            contents=[content for _, content in said],
        )
        self.harness.clock.advance(timedelta(seconds=60))
        return session_id

    def consolidator(self, model: Model | None = None, **changed: Any) -> Consolidator:
        """A consolidator like that of a worker. The default model is the harness's scripted model."""
        given: dict[str, Any] = {"embedder": self.embedder, "limits": self.limits} | changed
        return consolidator(
            self.harness.database, self.harness.clock, self.keeper, model=model or self.harness.model, **given
        )

    def limit(self, **changed: Any) -> None:
        """Override settings of the group `consolidation`."""
        self.limits = ConsolidationSettings(**(self.limits.model_dump() | changed))

    def known(self, user_id: str = "ana") -> Sequence[Any]:
        """The user's memories, including superseded ones, ordered by the start of their validity."""
        return self.harness.sql(KNOWN, user_id=user_id)

    def facts(self, user_id: str = "ana") -> list[tuple[str, float, int, list[int], str | None]]:
        """Each memory's content, importance, access count, source messages and replacement, for comparisons."""
        return [
            (row.content, round(row.importance, 9), row.access_count, row.seqs, row.replaced_by)
            for row in self.known(user_id)
        ]

    def session(self, session_id: UUID) -> Any:
        """The session's row."""
        return self.harness.session(session_id)


def consolidator(database: Database, clock: Clock, keeper: Keeper, **given: Any) -> Consolidator:
    """A consolidator. `keeper` renews the leases of the sessions that are being consolidated."""

    def holding(session_id: UUID, fence: Fence) -> AbstractContextManager[LeaseHold]:
        return keeper.keep_fenced(session_id, fence)

    usual: dict[str, Any] = {"limits": ConsolidationSettings(), "timeout_s": 5, "lease_s": LEASE_S}
    return Consolidator(database=database, clock=clock, holding=holding, **(usual | given))


def story(archive: Archive, user_id: str = "ana") -> None:
    """Add sessions with new, repeated and contradicting statements, and one session that is too short."""
    archive.embedder = Grouped(*GROUPS)
    archive.ended(LYON, "I have a dog called Rex.", user_id=user_id)
    archive.ended("I have a dog called Rex.", HOME, user_id=user_id)
    archive.ended(PARIS, user_id=user_id)
    archive.ended("Hi.", turns=1, user_id=user_id)


def french_story(archive: Archive, user_id: str = "ana") -> None:
    """As `story`, in a language that no rule reads: only the decisions of `Deciding` tell what has changed."""
    archive.ended("J'habite à Lyon.", "Mon chien s'appelle Rex.", user_id=user_id)
    archive.ended("Mon chien s'appelle Rex.", "Lyon est ma ville.", user_id=user_id)
    archive.ended("Je me suis installé à Paris.", user_id=user_id)
    archive.ended("Salut.", turns=1, user_id=user_id)


_DECISIONS = {
    ("J'habite à Lyon.", "Lyon est ma ville."): "same",
    ("J'habite à Lyon.", "Je me suis installé à Paris."): "changes",
    ("Mon chien s'appelle Rex.", "Mon chien s'appelle Rex."): "same",
}


class Deciding:
    """A model that extracts each line of the user, and decides about the known memories as `_DECISIONS` says."""

    name = "deciding"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        lines = [line.split("user: ", 1)[1] for line in request.messages[1].content.splitlines()]
        known = request.messages[2].content.splitlines()[1:] if len(request.messages) > 2 else []
        found = []
        for line in lines:
            given: dict[str, Any] = {"subject": "user", "attribute": "pet" if "chien" in line else "home"}
            item = memory(line, **given, decision="new", known=0)
            for number, listed in enumerate(known, start=1):
                decision = _DECISIONS.get((listed.split(") ", 1)[1], line))
                item |= {"decision": decision, "known": number} if decision else {}
            found.append(item)
        return answer(*found)


def answer(*items: dict[str, Any] | str) -> ModelReply:
    """A model's reply to an extraction request. A plain string is the content of a memory."""
    return says(json.dumps([item if isinstance(item, dict) else memory(item) for item in items], ensure_ascii=False))


def memory(content: str, importance: float = 0.5, kind: str = "fact", **more: Any) -> dict[str, Any]:
    """One memory of a model's reply."""
    return {"content": content, "type": kind, "importance": importance, **more}


def echo(request: ModelRequest, call: ModelCall) -> ModelReply:
    """A reply that contains one fact for each user line of the prompt."""
    lines = [line.split("user: ", 1)[1] for line in request.messages[1].content.splitlines() if "user: " in line]
    return answer(*lines)


class Echo:
    """A model that replies with one fact for each user line of the prompt. It calls `before` before each reply."""

    name = "echo"

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self._before = before

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        self._before()
        return echo(request, call)
