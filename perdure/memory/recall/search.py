"""Recall: what was said (episodic) and what is known (semantic) that bears on a question.

Each layer is asked by words and by vectors. Scores are normalised to the best of their kind and
fused by the weights of `PERDURE_MEMORY__RECALL_*`; what was said when the question says gains; a
message also lives on what stands beside it, for an answer often shares no word with its question,
and the line before it does. A memory that was superseded stays findable, behind what holds. Every
statement is bounded by one user's rows.

By vectors: exactly over the user's own rows while they are few, by an index beyond that, and
exactly after all where the index finds too little. While the embedder is away, by words alone.
What is read of memories is recorded: reading keeps them alive, and makes the hot ones.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from perdure.clock import Clock
from perdure.database.engine import Database, Statement
from perdure.errors import Abandoned, InvalidRequest, PerdureError, Unavailable, loggable
from perdure.ids import new_id
from perdure.memory.embedding import vector_literal
from perdure.memory.recall import queries
from perdure.memory.recall.time_spans import TimeSpan, find_spans
from perdure.models.embedders.protocol import Embedder
from perdure.models.protocol import ModelCall
from perdure.settings import MemorySettings
from perdure.text.untrusted import storable

log = logging.getLogger(__name__)

MAX_QUERY_CHARS = 2_000
"""Of a longer question as much is looked for: half of it from its beginning, half from its end."""

MAX_K = 100

CANDIDATES = 60
"""Of each kind that are looked at: by words, and by vectors."""

_WITHIN = 20
_MOST_TERMS = 32
_MOST_ROWS = 500
_MOST_FOUND = 200
_COMMON = 0.1
"""A term that more than this share of a user's newest rows hold is not looked up among the older ones."""

_REACH = 2
_SEQ_REACH = 6
_NEIGHBOURED = 20
"""The best of each kind whose neighbours are looked at, or as many as are asked for."""
_BEFORE = 0.9
_SUPERSEDED = 0.5
_WORTH = 0.15


class Layer(StrEnum):
    """Where a recollection comes from."""

    EPISODIC = "episodic"
    SEMANTIC = "semantic"


BOTH = frozenset(Layer)


@dataclass(frozen=True, slots=True)
class PromptWindow:
    """What the prompt holds already: the messages of a session from a `seq` on."""

    session_id: UUID
    from_seq: int = 0


@dataclass(frozen=True, slots=True)
class Recalled:
    """Something recalled. `score` is from 0 to 1; `occurred_at` is when it was said.

    An episodic one is a message with its one id, the sender's own where it gave one. A semantic
    one has a UUID, names its sources, has a `kind`, and a `valid_to` if something said later contradicts it.
    """

    layer: Layer
    id: UUID | str
    content: str
    score: float
    message_ids: tuple[str, ...]
    occurred_at: datetime
    role: str | None = None
    author: str | None = None
    channel: str | None = None
    session_id: UUID | None = None
    seq: int | None = None
    kind: str | None = None
    valid_to: datetime | None = None

    def as_json(self) -> dict[str, Any]:
        """As `POST /v1/memory/search` answers."""
        return {
            "layer": self.layer.value,
            "id": str(self.id),
            "content": self.content,
            "score": round(self.score, 6),
            "message_ids": list(self.message_ids),
            "occurred_at": self.occurred_at.isoformat(),
        }


@dataclass(frozen=True, slots=True)
class Recall:
    """How this installation recalls. Threads may share it."""

    database: Database
    embedder: Embedder | None
    settings: MemorySettings
    clock: Clock
    timezone: str = "UTC"

    def search(
        self,
        user_id: str,
        query: str,
        k: int = 10,
        layers: Iterable[Layer] = BOTH,
        *,
        seen: PromptWindow | None = None,
        kin: Sequence[UUID] = (),
        call: ModelCall | None = None,
        record: bool = True,
    ) -> list[Recalled]:
        """The `k` most relevant of what this user said, was told and is known of, best first.

        What was said in the sessions `kin` is left out. `call` bounds the embedding of the question. Without
        `record` memories do not notice.

        Raises:
            InvalidRequest: `k` is not within 1 and 100.
            CallAborted: `call` was ended.
            Unavailable: the database cannot be reached.
        """
        if not 1 <= k <= MAX_K:
            raise InvalidRequest(f"k must be from 1 to {MAX_K}.")
        wanted = frozenset(layers)
        if not query.strip() or not wanted:
            return []
        asked = self._asked(user_id, query, call, seen, kin)
        found = asked.messages(k) if Layer.EPISODIC in wanted else []
        found += asked.memories(k) if Layer.SEMANTIC in wanted else []
        found.sort(key=lambda each: (-each.score, each.layer.value, str(each.id)))
        if record:
            self._record(user_id, found[:k])
        return found[:k]

    def nearest_memories(self, user_id: str, query: str) -> Sequence[Any]:
        """The memories that vectors alone find, `(memory_id, similarity)`, nearest first: for who measures them."""
        return self._asked(user_id, query, None).near(queries.MEMORIES_NEAR)

    def _asked(
        self,
        user_id: str,
        query: str,
        call: ModelCall | None,
        seen: PromptWindow | None = None,
        kin: Sequence[UUID] = (),
    ) -> _Asked:
        text = embedded_text(query)
        when = find_spans(text, self.clock.now(), ZoneInfo(self.timezone))
        return _Asked(self, storable(user_id), text, when, self._vector(text, call), seen, tuple(kin))

    def _vector(self, text: str, call: ModelCall | None) -> _Vector | None:
        if self.embedder is None:
            return None
        try:
            vector = self.embedder.embed([text], call)[0]
        except Abandoned:
            raise
        except PerdureError as error:
            name, why = self.embedder.name, loggable(error)
            log.warning("the embedder %s is unavailable, so recall goes by words alone: %s", name, why)
            return None
        known = self.database.run(queries.EMBEDDER, {"name": self.embedder.name, "dimensions": len(vector)})
        if not known:
            return None
        return _Vector(known[0].embedder_id, len(vector), known[0].indexed, vector_literal(vector))

    def _record(self, user_id: str, found: Sequence[Recalled]) -> None:
        memory_ids = [each.id for each in found if each.layer is Layer.SEMANTIC]
        if not memory_ids:
            return
        given = {"memory_ids": memory_ids, "user_id": user_id, "access_id": new_id(self.clock)}
        try:
            self.database.run(queries.ACCESSED, given)
        except Unavailable as error:  # what was recalled is at hand all the same
            log.warning("that %d memories were read is not recorded: %s", len(memory_ids), error)


@dataclass(frozen=True, slots=True)
class _Vector:
    embedder_id: int
    dimensions: int
    indexed: bool
    parameter: str


_Place = tuple[str, int]
"""A session's id, and a message's `seq` in it."""

_Stretch = tuple[str, int, int]
"""A session's id, and the first and the last `seq` of some messages."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One question, made ready."""

    recall: Recall
    user_id: str
    text: str
    when: tuple[TimeSpan, ...]
    vector: _Vector | None
    seen: PromptWindow | None
    kin: tuple[UUID, ...]

    def messages(self, k: int) -> list[Recalled]:
        """The `k` best messages."""
        weights = self.recall.settings
        by_words = _normalised(self._by_words(queries.MESSAGES_BY_WORDS), _place)
        near = [_place(row) for row in self.near(queries.MESSAGES_NEAR)]
        within = [_place(row) for row in self._within(queries.MESSAGES_WITHIN)]
        neighboured = max(_NEIGHBOURED, k)
        leading = {*islice(by_words, neighboured), *near[:neighboured], *within}
        around = self._around(_stretches(leading, {*by_words, *near} - leading))
        similar = _stretched({_place(row): row.similarity for row in around})
        in_time = {_place(row): _is_within(row.occurred_at, self.when) for row in around}
        own = {
            place: weights.recall_text * by_words.get(place, 0.0) + weights.recall_vector * similar.get(place, 0.0)
            for place in in_time
        }
        scores = _lent(own, _by_stretch(around), weights.recall_neighbours)
        total = weights.recall_text + weights.recall_vector
        if self.when:
            scores = {place: score + weights.recall_time * total * in_time[place] for place, score in scores.items()}
        best = sorted(scores, key=lambda place: (-scores[place], place))[:k]
        highest = total * (1 + weights.recall_neighbours + weights.recall_time * bool(self.when))
        return self._told(best, {place: min(1.0, scores[place] / highest) if highest else 0.0 for place in best})

    def memories(self, k: int) -> list[Recalled]:
        """The `k` best memories."""
        weights = self.recall.settings
        by_words = _normalised(self._by_words(queries.MEMORIES_BY_WORDS), lambda row: row.memory_id)
        ids = {*by_words, *(row.memory_id for row in self.near(queries.MEMORIES_NEAR))}
        ids |= {row.memory_id for row in self._within(queries.MEMORIES_WITHIN)}
        if not ids:
            return []
        rows = self._run(queries.MEMORIES, memory_ids=list(ids))
        similar = _stretched({row.memory_id: row.similarity for row in rows})
        total = weights.recall_text + weights.recall_vector
        highest = total * (1 + weights.recall_time * bool(self.when)) * (1 + _WORTH)

        def score(row: Any) -> float:
            fused = weights.recall_text * by_words.get(row.memory_id, 0.0)
            fused += weights.recall_vector * similar.get(row.memory_id, 0.0)
            fused += weights.recall_time * total * _is_within(row.valid_from, self.when)
            fused *= (1 + _WORTH * row.value) * (1 if row.valid_to is None else _SUPERSEDED)
            return min(1.0, fused / highest) if highest else 0.0

        best = sorted(((score(row), row) for row in rows), key=lambda each: (-each[0], each[1].memory_id))[:k]
        return [
            Recalled(
                Layer.SEMANTIC,
                row.memory_id,
                row.content,
                fused,
                tuple(row.message_ids),
                row.valid_from,
                kind=row.kind,
                valid_to=row.valid_to,
            )
            for fused, row in best
        ]

    def _run(self, statement: Statement, **given: Any) -> Sequence[Any]:
        seen = self.seen
        return self.recall.database.run(
            statement,
            {
                "user_id": self.user_id,
                "query": self.text,
                "vector": None if self.vector is None else self.vector.parameter,
                "embedder_id": None if self.vector is None else self.vector.embedder_id,
                "seen_session": None if seen is None else seen.session_id,
                "seen_from": None if seen is None else seen.from_seq,
                "kin": list(self.kin),
                "most": CANDIDATES,
                **given,
            },
        )

    def _by_words(self, statement: Statement) -> Sequence[Any]:
        bounds = {"most_rows": _MOST_ROWS, "most_found": _MOST_FOUND, "most_terms": _MOST_TERMS}
        return self._run(statement, common=_COMMON, **bounds)

    def near(self, exact: Statement) -> Sequence[Any]:
        """What vectors find: `exact` says which layer, and how where the user's rows are few."""
        if self.vector is None:
            return ()
        messages = exact is queries.MESSAGES_NEAR
        few = queries.FEW_MESSAGES if messages else queries.FEW_MEMORIES
        if not self.vector.indexed or self._run(few, exact_rows=self.recall.settings.exact_rows)[0].few:
            return self._run(exact)
        by_index = queries.messages_near_by_index if messages else queries.memories_near_by_index
        found = self._run(by_index(self.vector.embedder_id, self.vector.dimensions))
        return found if len(found) == CANDIDATES else self._run(exact)

    def _within(self, statement: Statement) -> Iterable[Any]:
        for span in self.when:
            yield from self._run(statement, start=span.start, end=span.end, most=_WITHIN)

    def _around(self, stretches: Sequence[_Stretch]) -> Sequence[Any]:
        if not stretches:
            return ()
        session_ids, firsts, lasts = (list(each) for each in zip(*stretches, strict=True))
        return self._run(queries.AROUND, session_ids=session_ids, firsts=firsts, lasts=lasts)

    def _told(self, best: Sequence[_Place], scores: Mapping[_Place, float]) -> list[Recalled]:
        if not best:
            return []
        rows = self._run(queries.MESSAGES, session_ids=[each[0] for each in best], seqs=[each[1] for each in best])
        told = []
        for row in rows:
            message_id = row.message_id or f"{row.session_id}:{row.seq}"
            told.append(
                Recalled(
                    Layer.EPISODIC,
                    message_id,
                    row.content,
                    scores[str(row.session_id), row.seq],
                    (message_id,),
                    row.occurred_at,
                    role=row.role,
                    author=row.author,
                    channel=row.channel,
                    session_id=row.session_id,
                    seq=row.seq,
                )
            )
        return told


def embedded_text(query: str) -> str:
    """What of a question is looked for, and made a vector."""
    text = storable(query)
    if len(text) <= MAX_QUERY_CHARS:
        return text
    half = MAX_QUERY_CHARS // 2
    return f"{text[:half]} {text[-half:]}"


def _place(row: Any) -> _Place:
    return row.session_id, row.seq


def _normalised(rows: Sequence[Any], key: Any) -> dict[Any, float]:
    """The scores of rows that come best first, as parts of the best."""
    return {key(row): row.score / rows[0].score for row in rows}


def _stretched(similarities: Mapping[Any, float | None]) -> dict[Any, float]:
    """Similarities, from 0 for the least alike to 1 for the most alike; none where there is no vector."""
    known = {key: value for key, value in similarities.items() if value is not None}
    if not known:
        return {}
    low, high = min(known.values()), max(known.values())
    reach = high - low
    return {key: (value - low) / reach if reach > 0 else 0.0 for key, value in known.items()}


def _stretches(neighboured: Iterable[_Place], alone: Iterable[_Place]) -> list[_Stretch]:
    """What is within reach of some places, and others alone: sessions, a first and a last `seq`; none overlap."""
    reach = [(session_id, seq - _SEQ_REACH, seq + _SEQ_REACH) for session_id, seq in neighboured]
    stretches: list[_Stretch] = []
    for session_id, first, last in sorted([*reach, *((session_id, seq, seq) for session_id, seq in alone)]):
        if stretches and stretches[-1][0] == session_id and first <= stretches[-1][2] + 1:
            _, first, before = stretches.pop()  # noqa: PLW2901
            last = max(last, before)  # noqa: PLW2901
        stretches.append((session_id, first, last))
    return stretches


def _by_stretch(rows: Iterable[Any]) -> list[list[_Place]]:
    """The places of each stretch, in order: between two of them there is no message."""
    stretches: defaultdict[int, list[_Place]] = defaultdict(list)
    for row in rows:
        stretches[row.stretch].append(_place(row))
    return [sorted(places) for places in stretches.values()]


def _lent(own: Mapping[_Place, float], stretches: Iterable[Sequence[_Place]], share: float) -> dict[_Place, float]:
    """Each message's own score, and a share of the best of those beside it: the nearer, the more."""
    scores = {}
    for places in stretches:
        its_own = [own[place] for place in places]
        for at, place in enumerate(places):
            lent = 0.0
            for other in range(max(0, at - _REACH), min(len(places), at + _REACH + 1)):
                if other != at and abs(places[other][1] - place[1]) <= _SEQ_REACH:
                    nearness = (1 if other < at else _BEFORE) / abs(other - at)
                    lent = max(lent, its_own[other] * share * nearness)
            scores[place] = its_own[at] + lent
    return scores


def _is_within(moment: datetime, when: Sequence[TimeSpan]) -> bool:
    return any(span.start <= moment < span.end for span in when)
