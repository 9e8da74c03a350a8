"""Hybrid search over a user's messages (episodic) and memories (semantic), by words and by vectors.

Word and vector scores are each normalised to at most 1, multiplied by the weights `PERDURE_MEMORY__RECALL_*` and
summed. Messages and memories from a time that the query names score higher. A message's score also grows with the
scores of its neighbours: an answer often shares no word with the query, but the message before the answer does. The
best messages and memories are compared with the query word by word (`late_interaction`). Of the best messages, those
score higher whose author the query names, and the earlier or later ones, if the query asks for the first or the last
(`cues`). Superseded memories rank lower. A search finds only the messages and memories of one user.

Vector search is exact while the user has few rows. For other users it uses the HNSW index. If the index finds too few
rows, an exact search runs instead. Without an available embedder, the search uses words only. A reranker, if one is
set, orders the best results.

A search records an access to each memory that it returns. Accesses slow decay and determine the hot memories.

Called for each prompt, and by the tool `recall`, `POST /v1/memory/search` and `perdure memory search`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from perdure.access.tenants import UserKey
from perdure.clock import Clock, iso
from perdure.database.engine import Database, Statement
from perdure.errors import Abandoned, InvalidRequest, PerdureError, Unavailable, loggable
from perdure.ids import new_id
from perdure.memory.embedding import vector_literal
from perdure.memory.recall import queries
from perdure.memory.recall.cues import Cues, find_cues, names_of
from perdure.memory.recall.expansion import Expansion, expand
from perdure.memory.recall.late_interaction import fits
from perdure.memory.recall.queries import CANDIDATES
from perdure.memory.recall.reranking import MOST_RERANKED, Reranker
from perdure.memory.recall.time_spans import TimeSpan, find_spans
from perdure.models.embedders.protocol import Embedder, Vector, embedded_text
from perdure.models.protocol import ModelCall
from perdure.settings import MemorySettings
from perdure.text.untrusted import storable

log = logging.getLogger(__name__)

MAX_K = 100

_MOST_WITHIN_SPAN = 20
_MOST_TERMS = 48
_MOST_TELLING = 8
"""Older rows are looked up by related words only if these are among so many heaviest terms."""
_MOST_ROWS = 200
_MOST_FOUND = 200
_MOST_AT_ONCE = 2_000
"""A user with at most so many rows has the older ones looked up by all telling terms at once."""
_COMMON_SHARE = 0.1
"""A term in more than this fraction of a user's newest rows is not looked up among the older rows."""

_SEQ_REACH = 6
_MOST_BEST = 20
"""Number of best word matches, and of best vector matches, whose neighbours are examined.

If a search has a greater `k`, `k` is used instead of this number.
"""
_PRECEDING_FACTOR = 0.6
_SUPERSEDED_FACTOR = 0.5
_VALUE_WEIGHT = 0.15

_MOST_COMPARED = 30
"""Number of best messages, and of best memories, whose words are compared with the question's; cues apply to them."""
_READ_CHARS = 8_000
"""So many characters of each message are read. The rest is read if the message is among the results."""
_FIT_WEIGHT = 3.0
"""How much higher the score of a text is whose words fit the question perfectly, than that of a text without any."""

_AUTHOR_WEIGHT = 0.2
_ORDER_WEIGHT = 0.5

_VECTOR_WEIGHTS = {"hash": 0.6, "static": 1.2, "wordllama": 1.0}
"""The weights of vectors, by the scheme of their embedder, fitted on the conversations in `benchmarks/data`."""
_VECTOR_WEIGHT = 1.5
"""The weight of other embedders' vectors, fitted for a small encoder."""


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
    memory superseded this memory, or if the user said until when it holds.
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
            "valid_until": iso(self.valid_to),
        }


@dataclass(frozen=True, slots=True)
class Recall:
    """Searches the memory of one installation. Threads may share it."""

    database: Database
    embedder: Embedder | None
    settings: MemorySettings
    clock: Clock
    timezone: str = "UTC"
    reranker: Reranker | None = None

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
        zone: ZoneInfo | None = None,
    ) -> list[Recalled]:
        """The `k` most relevant messages and memories of this user, best first.

        Excludes the messages that `in_prompt` describes, and all messages of `exclude_sessions`. `call` limits the time
        for embedding the query and for the reranker. With `record=False`, the search records no accesses. Days begin at
        midnight in `zone`, by default the installation's time zone.

        Raises:
            InvalidRequest: `k` is not from 1 to 100.
            CallAborted: `call` was aborted.
        """
        if not 1 <= k <= MAX_K:
            raise InvalidRequest(f"k must be from 1 to {MAX_K}.")
        wanted = frozenset(layers)
        if not query.strip() or not wanted:
            return []
        prepared = self._prepare(user_id, query, call, in_prompt, exclude_sessions, zone=zone)
        most = max(k, _MOST_COMPARED, MOST_RERANKED)
        messages = prepared.messages(most, max(k, _MOST_BEST)) if Layer.EPISODIC in wanted else []
        memories = prepared.memories(most) if Layer.SEMANTIC in wanted else []
        found = prepared.ordered(messages, memories)
        if self.reranker is not None and len(found) > 1:
            asking = call or ModelCall(self.clock, self.settings.recall_timeout_s)
            found = _reranked(self.reranker, prepared.text, found, asking)
        if record:
            self._record(prepared.user_id, found[:k])
        return self._whole(prepared.user_id, found[:k])

    def nearest_memories(self, user_id: UserKey, query: str) -> Sequence[Any]:
        """The memories whose vectors are nearest to the query's vector, as rows of `(memory_id, similarity)`.

        Used by benchmarks.
        """
        return self._prepare(user_id, query, None).near_memories()

    def _prepare(
        self,
        user_id: UserKey,
        query: str,
        call: ModelCall | None,
        in_prompt: PromptWindow | None = None,
        exclude_sessions: Sequence[UUID] = (),
        *,
        zone: ZoneInfo | None = None,
    ) -> _Query:
        owner, text = UserKey(storable(user_id)), embedded_text(query)
        values = self._embed(text, call)
        available = self.database.run(
            queries.AVAILABLE,
            {
                "user_id": owner,
                "name": None if values is None or self.embedder is None else self.embedder.name,
                "dimensions": 0 if values is None else len(values),
                "exact_rows": self.settings.exact_rows,
            },
        )[0]
        return _Query(
            self,
            owner,
            text,
            find_spans(text, self.clock.now(), zone or ZoneInfo(self.timezone)),
            available,
            None if values is None or available.embedder_id is None else vector_literal(values),
            in_prompt,
            tuple(exclude_sessions),
            expand(text, self.settings.recall_related),
        )

    def _embed(self, text: str, call: ModelCall | None) -> Vector | None:
        if self.embedder is None:
            return None
        try:
            return self.embedder.embed([text], call)[0]
        except Abandoned:
            raise
        except PerdureError as error:
            name, why = self.embedder.name, loggable(error)
            log.warning("the embedder %s is unavailable, so recall searches by words alone: %s", name, why)
            return None

    def _whole(self, user_id: UserKey, found: Sequence[Recalled]) -> list[Recalled]:
        """`found` with the whole content of messages of which only the beginning was read."""
        cut = {(each.session_id, each.seq) for each in found if len(each.content) == _READ_CHARS}
        if not cut:
            return list(found)
        session_ids, seqs = zip(*cut, strict=True)
        rows = self.database.run(
            queries.CONTENTS, {"user_id": user_id, "session_ids": list(session_ids), "seqs": list(seqs)}
        )
        whole = {(row.session_id, row.seq): row.content for row in rows}
        return [replace(each, content=whole.get((each.session_id, each.seq), each.content)) for each in found]

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
class _Scored:
    """What was found, its own score, and what it borrows from its neighbours and for its time."""

    found: Recalled
    own: float
    borrowed: float

    def fitted(self, weight: float, fit: float, average: float) -> Recalled:
        """With a score that is higher if its words fit the question.

        What it borrows grows as if it fitted at least as well as the others do on average: its own words tell little
        about that.
        """
        own, borrowed = self.own * (1 + weight * fit), self.borrowed * (1 + weight * max(fit, average))
        return replace(self.found, score=min(1.0, (own + borrowed) / (1 + weight)))


@dataclass(frozen=True, slots=True)
class _Query:
    """One prepared query: its text, time spans, vector and exclusions.

    `available` is the row of `queries.AVAILABLE`. `vector` is `None` if no stored vector can be compared with it.
    """

    recall: Recall
    user_id: UserKey
    text: str
    time_spans: tuple[TimeSpan, ...]
    available: Any
    vector: str | None
    in_prompt: PromptWindow | None
    exclude_sessions: tuple[UUID, ...]
    expansion: Expansion

    @property
    def vector_weight(self) -> float:
        """`PERDURE_MEMORY__RECALL_VECTOR`, or else the weight that was fitted for the embedder. 0 without a vector."""
        embedder, given = self.recall.embedder, self.recall.settings.recall_vector
        if self.vector is None or embedder is None:
            return 0.0
        if given is not None:
            return given
        return _VECTOR_WEIGHTS.get(embedder.name.partition(":")[0], _VECTOR_WEIGHT)

    def messages(self, k: int, most_best: int) -> list[_Scored]:
        """The `k` best messages, best first. The neighbours of the `most_best` best of each search are examined."""
        weights = self.recall.settings
        total = weights.recall_text + self.vector_weight
        highest = total * (1 + weights.recall_neighbours + weights.recall_time * bool(self.time_spans)) or 1.0
        rows = self._find_messages(k, most_best, weights.recall_time * total)
        ids = [row.message_id or f"{row.session_id}:{row.seq}" for row in rows]
        return [
            _Scored(
                Recalled(
                    Layer.EPISODIC,
                    message_id,
                    row.content,
                    0.0,
                    (message_id,),
                    row.occurred_at,
                    role=row.role,
                    author=row.author,
                    channel=row.channel,
                    session_id=row.session_id,
                    seq=row.seq,
                ),
                row.own / highest,
                row.borrowed / highest,
            )
            for message_id, row in zip(ids, rows, strict=True)
        ]

    def memories(self, k: int) -> list[_Scored]:
        """The `k` best memories, best first."""
        if not self.available.has_memories:
            return []
        weights = self.recall.settings
        by_words = {row.memory_id: row.score for row in self._run(queries.MEMORIES_BY_WORDS)}
        ids = {*by_words, *(row.memory_id for row in self.near_memories())}
        for span in self.time_spans:
            within = self._run(queries.MEMORIES_WITHIN, start=span.start, end=span.end, most=_MOST_WITHIN_SPAN)
            ids |= {row.memory_id for row in within}
        if not ids:
            return []
        rows = self._run(queries.MEMORIES, memory_ids=list(ids))
        similar = _rescaled({row.memory_id: row.similarity for row in rows})
        total = weights.recall_text + self.vector_weight
        highest = total * (1 + weights.recall_time * bool(self.time_spans)) * (1 + _VALUE_WEIGHT) or 1.0

        def scored(row: Any) -> _Scored:
            own = weights.recall_text * by_words.get(row.memory_id, 0.0)
            own += self.vector_weight * similar.get(row.memory_id, 0.0)
            borrowed = weights.recall_time * total * _is_within(row.valid_from, self.time_spans)
            factor = (1 + _VALUE_WEIGHT * row.value) * (1 if row.valid_to is None else _SUPERSEDED_FACTOR) / highest
            found = Recalled(
                Layer.SEMANTIC,
                row.memory_id,
                row.content,
                0.0,
                tuple(row.message_ids),
                row.valid_from,
                kind=row.kind,
                valid_to=row.valid_to,
            )
            return _Scored(found, own * factor, borrowed * factor)

        best = sorted(map(scored, rows), key=lambda each: (-each.own - each.borrowed, each.found.id))
        return best[:k]

    def ordered(self, messages: Sequence[_Scored], memories: Sequence[_Scored]) -> list[Recalled]:
        """What was found, with its scores, best first. The best of both layers are compared with the question."""
        said, known = messages[:_MOST_COMPARED], memories[:_MOST_COMPARED]
        best = [*said, *known]
        fitting, average = [0.0] * len(best), 0.0
        weight = _FIT_WEIGHT * self.recall.settings.recall_related if self.expansion.own else 0.0
        if weight:
            fitting, average = fits(
                self.expansion,
                [each.found.content for each in best],
                [each.own + each.borrowed for each in best],
                names_of(each.found.author for each in best),
            )

        def scored(found: Sequence[_Scored], of_best: Sequence[float]) -> list[Recalled]:
            fits_of_all = [*of_best, *[average] * (len(found) - len(of_best))]
            fitted = [each.fitted(weight, fit, average) for each, fit in zip(found, fits_of_all, strict=True)]
            return sorted(fitted, key=lambda each: -each.score)

        ranked = _cued(scored(messages, fitting[: len(said)]), find_cues(self.text))
        ranked += scored(memories, fitting[len(said) :])
        return sorted(ranked, key=lambda each: (-each.score, each.layer.value))  # of one layer, the order stays

    def near_memories(self) -> Sequence[Any]:
        """The memories whose vectors are nearest to the query's vector."""
        if self.vector is None:
            return ()
        if not self.available.few_memories:
            found = self._run(queries.memories_near_by_index(self.available.embedder_id, self.available.dimensions))
            if len(found) == CANDIDATES:
                return found
        return self._run(queries.MEMORIES_NEAR)

    def _find_messages(self, k: int, most_best: int, time_weight: float) -> Sequence[Any]:
        weights = self.recall.settings
        given = {
            "k": k,
            "most_best": most_best,
            "most_within": _MOST_WITHIN_SPAN,
            "seq_reach": _SEQ_REACH,
            "preceding": _PRECEDING_FACTOR,
            "starts": [span.start for span in self.time_spans],
            "ends": [span.end for span in self.time_spans],
            "text_weight": weights.recall_text,
            "vector_weight": self.vector_weight,
            "neighbours_weight": weights.recall_neighbours,
            "time_weight": time_weight,
        }
        if not self.available.few_messages:
            by_index = queries.find_messages_by_index(self.available.embedder_id, self.available.dimensions)
            found = self._run(by_index, **given)
            if found and found[0].near == CANDIDATES:
                return found
        return self._run(queries.FIND_MESSAGES, **given)

    def _run(self, statement: Statement, **parameters: Any) -> Sequence[Any]:
        in_prompt = self.in_prompt
        return self.recall.database.run(
            statement,
            {
                "user_id": self.user_id,
                "query": self.text,
                "vector": self.vector,
                "embedder_id": self.available.embedder_id,
                "seen_session": None if in_prompt is None else in_prompt.session_id,
                "seen_from": None if in_prompt is None else in_prompt.from_seq,
                "exclude_sessions": list(self.exclude_sessions),
                "most": CANDIDATES,
                "most_rows": _MOST_ROWS,
                "most_found": _MOST_FOUND,
                "most_at_once": _MOST_AT_ONCE,
                "read_chars": _READ_CHARS,
                "most_terms": _MOST_TERMS,
                "most_telling": _MOST_TELLING,
                "words": " ".join(self.expansion.words),
                "shares": list(self.expansion.weights),
                "own": self.expansion.own,
                "common": _COMMON_SHARE,
                **parameters,
            },
        )


def _cued(found: list[Recalled], cues: Cues) -> list[Recalled]:
    """The messages `found`, the first `_MOST_COMPARED` of them in the order that the question's cues give.

    The scores stay at their places: a cue prefers a message to another one, and not to a memory.
    """
    best = found[:_MOST_COMPARED]
    by_time = sorted(range(len(best)), key=lambda at: (best[at].occurred_at, best[at].seq), reverse=cues.order < 0)
    places = {at: place / max(len(best) - 1, 1) for place, at in enumerate(by_time)}

    def cued(at: int) -> float:
        author = 1 + _AUTHOR_WEIGHT * cues.names(best[at].author)
        return best[at].score * author * (1 + _ORDER_WEIGHT * abs(cues.order) * places[at])

    return _in_order(found, sorted(range(len(best)), key=lambda at: -cued(at)))


def _reranked(reranker: Reranker, question: str, found: list[Recalled], call: ModelCall) -> list[Recalled]:
    """`found` in the reranker's order."""
    best = found[:MOST_RERANKED]
    try:
        first = reranker.rank(question, [each.content for each in best], call)
    except Abandoned:
        raise
    except Exception as error:  # noqa: BLE001 (another package's reranker may raise anything)
        log.warning("the reranker is unavailable, so what recall found keeps its order: %s", loggable(error))
        return found
    places = range(len(best))
    return _in_order(found, list(dict.fromkeys([*(at for at in first if at in places), *places])))


def _in_order(found: list[Recalled], order: Sequence[int]) -> list[Recalled]:
    """`found`, whose first results are those at the places `order`. Each place keeps its score."""
    moved = [replace(found[at], score=place.score) for at, place in zip(order, found, strict=False)]
    return moved + found[len(order) :]


def _rescaled(similarities: Mapping[Any, float | None]) -> dict[Any, float]:
    """Similarities scaled to 0 (least similar) to 1 (most similar); rows without a vector are omitted."""
    known = {key: value for key, value in similarities.items() if value is not None}
    if not known:
        return {}
    low, high = min(known.values()), max(known.values())
    reach = high - low
    return {key: (value - low) / reach if reach > 0 else 0.0 for key, value in known.items()}


def _is_within(moment: datetime, time_spans: Sequence[TimeSpan]) -> bool:
    return any(span.start <= moment < span.end for span in time_spans)
