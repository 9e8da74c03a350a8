"""Hybrid search over a user's messages (episodic) and memories (semantic), by words and by vectors.

Word and vector scores are each normalised to at most 1, multiplied by the weights `PERDURE_MEMORY__RECALL_*` and
summed. Messages and memories from a time that the query names score higher. A message's score also grows with the
scores of its neighbours: an answer often shares no word with the query, but the message before the answer does.
Superseded memories rank lower. A search finds only the messages and memories of one user.

Vector search is exact while the user has few rows. For other users it uses the HNSW index. If the index finds too few
rows, an exact search runs instead. Without an available embedder, the search uses words only.

A search records an access to each memory that it returns. Accesses slow decay and determine the hot memories.

Called for each prompt, and by the tool `recall`, `POST /v1/memory/search` and `perdure memory search`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Database, Statement
from perdure.errors import Abandoned, InvalidRequest, PerdureError, Unavailable, loggable
from perdure.ids import new_id
from perdure.memory.embedding import vector_literal
from perdure.memory.recall import queries
from perdure.memory.recall.time_spans import TimeSpan, find_spans
from perdure.models.embedders.protocol import Embedder, embedded_text
from perdure.models.protocol import ModelCall
from perdure.settings import MemorySettings
from perdure.text.untrusted import storable

log = logging.getLogger(__name__)

MAX_K = 100

CANDIDATES = 60
"""Maximum rows that one search by words or by vectors returns."""

_MOST_WITHIN_SPAN = 20
_MOST_TERMS = 32
_MOST_ROWS = 500
_MOST_FOUND = 200
_COMMON_SHARE = 0.1
"""A term in more than this fraction of a user's newest rows is not looked up among the older rows."""

_REACH = 2
_SEQ_REACH = 6
_MOST_WITH_NEIGHBOURS = 20
"""Number of best word matches, and of best vector matches, whose neighbours are examined.

If a search has a greater `k`, `k` is used instead of this number.
"""
_PRECEDING_FACTOR = 0.9
_SUPERSEDED_FACTOR = 0.5
_VALUE_WEIGHT = 0.15


class Layer(StrEnum):
    """The part of memory that a search reads: `EPISODIC` is messages, `SEMANTIC` is memories."""

    EPISODIC = "episodic"
    SEMANTIC = "semantic"


BOTH = frozenset(Layer)


@dataclass(frozen=True, slots=True)
class PromptWindow:
    """The messages that the prompt already contains: the session's messages with a `seq` of at least `from_seq`."""

    session_id: UUID
    from_seq: int = 0


@dataclass(frozen=True, slots=True)
class Recalled:
    """One search result. `score` is from 0 to 1. `occurred_at` is the time of the message, or of the memory's source.

    The `id` of a message (`EPISODIC`) is the sender's `message_id`, or `session_id:seq` if the sender gave no id. The
    `id` of a memory (`SEMANTIC`) is its UUID, and `message_ids` are its source messages. `valid_to` is set if a newer
    memory superseded this memory.
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
    """Searches the memory of one installation. Threads may share it."""

    database: Database
    embedder: Embedder | None
    settings: MemorySettings
    clock: Clock
    timezone: str = "UTC"

    def using(self, embedder: Embedder) -> Recall:
        return replace(self, embedder=embedder)

    def search(
        self,
        user_id: UserKey,
        query: str,
        k: int = 10,
        layers: Iterable[Layer] = BOTH,
        *,
        in_prompt: PromptWindow | None = None,
        exclude_sessions: Sequence[UUID] = (),
        call: ModelCall | None = None,
        record: bool = True,
    ) -> list[Recalled]:
        """The `k` most relevant messages and memories of this user, best first.

        Excludes the messages that `in_prompt` describes, and all messages of `exclude_sessions`. `call` limits the time
        for embedding the query. With `record=False`, the search records no accesses.

        Raises:
            InvalidRequest: `k` is not from 1 to 100.
            CallAborted: `call` was aborted.
        """
        if not 1 <= k <= MAX_K:
            raise InvalidRequest(f"k must be from 1 to {MAX_K}.")
        wanted = frozenset(layers)
        if not query.strip() or not wanted:
            return []
        prepared = self._prepare(user_id, query, call, in_prompt, exclude_sessions)
        found = prepared.messages(k) if Layer.EPISODIC in wanted else []
        found += prepared.memories(k) if Layer.SEMANTIC in wanted else []
        found.sort(key=lambda each: (-each.score, each.layer.value, str(each.id)))
        if record:
            self._record(user_id, found[:k])
        return found[:k]

    def nearest_memories(self, user_id: UserKey, query: str) -> Sequence[Any]:
        """The memories whose vectors are nearest to the query's vector, as rows of `(memory_id, similarity)`.

        Used by benchmarks.
        """
        return self._prepare(user_id, query, None).near(queries.MEMORIES_NEAR)

    def _prepare(
        self,
        user_id: UserKey,
        query: str,
        call: ModelCall | None,
        in_prompt: PromptWindow | None = None,
        exclude_sessions: Sequence[UUID] = (),
    ) -> _Query:
        text = embedded_text(query)
        time_spans = find_spans(text, self.clock.now(), ZoneInfo(self.timezone))
        return _Query(
            self,
            UserKey(storable(user_id)),
            text,
            time_spans,
            self._vector(text, call),
            in_prompt,
            tuple(exclude_sessions),
        )

    def _vector(self, text: str, call: ModelCall | None) -> _Vector | None:
        if self.embedder is None:
            return None
        try:
            vector = self.embedder.embed([text], call)[0]
        except Abandoned:
            raise
        except PerdureError as error:
            name, why = self.embedder.name, loggable(error)
            log.warning("the embedder %s is unavailable, so recall searches by words alone: %s", name, why)
            return None
        known = self.database.run(queries.EMBEDDER, {"name": self.embedder.name, "dimensions": len(vector)})
        if not known:
            return None
        return _Vector(known[0].embedder_id, len(vector), known[0].indexed, vector_literal(vector))

    def _record(self, user_id: UserKey, found: Sequence[Recalled]) -> None:
        memory_ids = [each.id for each in found if each.layer is Layer.SEMANTIC]
        if not memory_ids:
            return
        parameters = {"memory_ids": memory_ids, "user_id": user_id, "access_id": new_id(self.clock)}
        try:
            self.database.run(queries.ACCESSED, parameters)
        except Unavailable as error:  # the results are valid without the record
            log.warning("the accesses of %d memories were not recorded: %s", len(memory_ids), loggable(error))


@dataclass(frozen=True, slots=True)
class _Vector:
    embedder_id: int
    dimensions: int
    indexed: bool
    parameter: str


_Place = tuple[str, int]
"""A session's id and a message's `seq`."""

_Range = tuple[str, int, int]
"""A session's id, and the first and last `seq` of consecutive messages."""


@dataclass(frozen=True, slots=True)
class _Query:
    """One prepared query: its text, time spans, vector and exclusions."""

    recall: Recall
    user_id: UserKey
    text: str
    time_spans: tuple[TimeSpan, ...]
    vector: _Vector | None
    in_prompt: PromptWindow | None
    exclude_sessions: tuple[UUID, ...]

    def messages(self, k: int) -> list[Recalled]:
        """The `k` best messages, best first."""
        weights = self.recall.settings
        by_words = _normalised(self._by_words(queries.MESSAGES_BY_WORDS), _place)
        near = [_place(row) for row in self.near(queries.MESSAGES_NEAR)]
        within = [_place(row) for row in self._within(queries.MESSAGES_WITHIN)]
        with_neighbours = max(_MOST_WITH_NEIGHBOURS, k)
        leading = {*islice(by_words, with_neighbours), *near[:with_neighbours], *within}
        around = self._around(_ranges(leading, {*by_words, *near} - leading))
        similar = _rescaled({_place(row): row.similarity for row in around})
        in_time = {_place(row): _is_within(row.occurred_at, self.time_spans) for row in around}
        direct = {
            place: weights.recall_text * by_words.get(place, 0.0) + weights.recall_vector * similar.get(place, 0.0)
            for place in in_time
        }
        scores = _with_neighbours(direct, _by_range(around), weights.recall_neighbours)
        total = weights.recall_text + weights.recall_vector
        if self.time_spans:
            scores = {place: score + weights.recall_time * total * in_time[place] for place, score in scores.items()}
        best = sorted(scores, key=lambda place: (-scores[place], place))[:k]
        highest = total * (1 + weights.recall_neighbours + weights.recall_time * bool(self.time_spans))
        return self._recalled(best, {place: min(1.0, scores[place] / highest) if highest else 0.0 for place in best})

    def memories(self, k: int) -> list[Recalled]:
        """The `k` best memories, best first."""
        weights = self.recall.settings
        by_words = _normalised(self._by_words(queries.MEMORIES_BY_WORDS), lambda row: row.memory_id)
        ids = {*by_words, *(row.memory_id for row in self.near(queries.MEMORIES_NEAR))}
        ids |= {row.memory_id for row in self._within(queries.MEMORIES_WITHIN)}
        if not ids:
            return []
        rows = self._run(queries.MEMORIES, memory_ids=list(ids))
        similar = _rescaled({row.memory_id: row.similarity for row in rows})
        total = weights.recall_text + weights.recall_vector
        highest = total * (1 + weights.recall_time * bool(self.time_spans)) * (1 + _VALUE_WEIGHT)

        def score(row: Any) -> float:
            fused = weights.recall_text * by_words.get(row.memory_id, 0.0)
            fused += weights.recall_vector * similar.get(row.memory_id, 0.0)
            fused += weights.recall_time * total * _is_within(row.valid_from, self.time_spans)
            fused *= (1 + _VALUE_WEIGHT * row.value) * (1 if row.valid_to is None else _SUPERSEDED_FACTOR)
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

    def _run(self, statement: Statement, **parameters: Any) -> Sequence[Any]:
        in_prompt = self.in_prompt
        return self.recall.database.run(
            statement,
            {
                "user_id": self.user_id,
                "query": self.text,
                "vector": None if self.vector is None else self.vector.parameter,
                "embedder_id": None if self.vector is None else self.vector.embedder_id,
                "seen_session": None if in_prompt is None else in_prompt.session_id,
                "seen_from": None if in_prompt is None else in_prompt.from_seq,
                "exclude_sessions": list(self.exclude_sessions),
                "most": CANDIDATES,
                **parameters,
            },
        )

    def _by_words(self, statement: Statement) -> Sequence[Any]:
        bounds = {"most_rows": _MOST_ROWS, "most_found": _MOST_FOUND, "most_terms": _MOST_TERMS}
        return self._run(statement, common=_COMMON_SHARE, **bounds)

    def near(self, exact: Statement) -> Sequence[Any]:
        """The rows whose vectors are nearest to the query's vector. `exact` is the statement for an exact search."""
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
        for span in self.time_spans:
            yield from self._run(statement, start=span.start, end=span.end, most=_MOST_WITHIN_SPAN)

    def _around(self, ranges: Sequence[_Range]) -> Sequence[Any]:
        if not ranges:
            return ()
        session_ids, firsts, lasts = (list(each) for each in zip(*ranges, strict=True))
        return self._run(queries.AROUND, session_ids=session_ids, firsts=firsts, lasts=lasts)

    def _recalled(self, best: Sequence[_Place], scores: Mapping[_Place, float]) -> list[Recalled]:
        if not best:
            return []
        rows = self._run(queries.MESSAGES, session_ids=[each[0] for each in best], seqs=[each[1] for each in best])
        recalled = []
        for row in rows:
            message_id = row.message_id or f"{row.session_id}:{row.seq}"
            recalled.append(
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
        return recalled


def _place(row: Any) -> _Place:
    return row.session_id, row.seq


def _normalised(rows: Sequence[Any], key: Any) -> dict[Any, float]:
    return {key(row): row.score / rows[0].score for row in rows}


def _rescaled(similarities: Mapping[Any, float | None]) -> dict[Any, float]:
    """Similarities scaled to 0 (least similar) to 1 (most similar); rows without a vector are omitted."""
    known = {key: value for key, value in similarities.items() if value is not None}
    if not known:
        return {}
    low, high = min(known.values()), max(known.values())
    reach = high - low
    return {key: (value - low) / reach if reach > 0 else 0.0 for key, value in known.items()}


def _ranges(with_neighbours: Iterable[_Place], alone: Iterable[_Place]) -> list[_Range]:
    """Non-overlapping ranges of messages that contain all given places.

    For a place in `with_neighbours`, the range also contains the `_SEQ_REACH` messages before the place and after it.
    A place in `alone` needs no neighbours.
    """
    reach = [(session_id, seq - _SEQ_REACH, seq + _SEQ_REACH) for session_id, seq in with_neighbours]
    ranges: list[_Range] = []
    for session_id, first, last in sorted([*reach, *((session_id, seq, seq) for session_id, seq in alone)]):
        if ranges and ranges[-1][0] == session_id and first <= ranges[-1][2] + 1:
            _, first, before = ranges.pop()  # noqa: PLW2901
            last = max(last, before)  # noqa: PLW2901
        ranges.append((session_id, first, last))
    return ranges


def _by_range(rows: Iterable[Any]) -> list[list[_Place]]:
    """Group the places of messages by range. Each group is in the order of `seq`."""
    ranges: defaultdict[int, list[_Place]] = defaultdict(list)
    for row in rows:
        ranges[row.stretch].append(_place(row))
    return [sorted(places) for places in ranges.values()]


def _with_neighbours(
    direct: Mapping[_Place, float], ranges: Iterable[Sequence[_Place]], share: float
) -> dict[_Place, float]:
    """Add to each message's direct score a fraction of its best neighbour's score.

    The fraction decreases with the distance between the two messages.
    """
    scores = {}
    for places in ranges:
        direct_scores = [direct[place] for place in places]
        for at, place in enumerate(places):
            borrowed = 0.0
            for other in range(max(0, at - _REACH), min(len(places), at + _REACH + 1)):
                if other != at and abs(places[other][1] - place[1]) <= _SEQ_REACH:
                    nearness = (1 if other < at else _PRECEDING_FACTOR) / abs(other - at)
                    borrowed = max(borrowed, direct_scores[other] * share * nearness)
            scores[place] = direct_scores[at] + borrowed
    return scores


def _is_within(moment: datetime, time_spans: Sequence[TimeSpan]) -> bool:
    return any(span.start <= moment < span.end for span in time_spans)
