"""What a model says is worth remembering, from text to data: strict about JSON, doubtful about the rest.

What is no JSON array of objects with a content is refused. What is one and says something odd
about an item (an importance of 7, a type of its own) is a doubt: the model is asked again, and if
it insists the item is kept, with the oddity put right, for what was said weighs more than how it
was rated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from perdure.text.linear import normalized
from perdure.text.untrusted import first_line, load_object

MAX_CONTENT_CHARS = 1_000
MAX_NAME_CHARS = 100
MOST_NAMES = 20
"""Entities, and relations, of one memory."""

_DEFAULT_IMPORTANCE = 0.5
_FENCE = "```"
_WRAPPED = "memories"


class MemoryKind(StrEnum):
    """What a memory is; how fast it fades depends on it."""

    FACT = "fact"
    PREFERENCE = "preference"
    INSIGHT = "insight"


@dataclass(frozen=True, slots=True)
class Entity:
    """Somebody or something that a memory is about."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Relation:
    """How two of them belong together, such as `user`, `lives_in`, `Lyon`."""

    subject: str
    relation: str
    object: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A memory as it was extracted. `sources` are the numbers of messages; `importance` is from 0 to 1."""

    content: str
    kind: MemoryKind
    importance: float
    sources: tuple[int, ...] = ()
    entities: tuple[Entity, ...] = ()
    relations: tuple[Relation, ...] = ()

    def merged_with(self, other: Candidate) -> Candidate:
        """The same said twice: of the greater importance, with the sources of both."""
        return replace(
            self,
            importance=max(self.importance, other.importance),
            sources=tuple(sorted({*self.sources, *other.sources})),
            entities=tuple(dict.fromkeys(self.entities + other.entities))[:MOST_NAMES],
            relations=tuple(dict.fromkeys(self.relations + other.relations))[:MOST_NAMES],
        )


@dataclass(frozen=True, slots=True)
class ParseWarning:
    """What is odd about the item of that number, counted from 1."""

    item: int
    fault: str


def parse(reply: str) -> tuple[list[Candidate], list[ParseWarning]]:
    """The candidates that `reply` holds, oddities put right, and which those were.

    Raises:
        ValueError: it is no JSON array of objects that have a content; the message says what is wrong.
    """
    items = _items(_without_fence(reply.strip()))
    warnings: list[ParseWarning] = []
    return [_candidate(item, number, warnings) for number, item in enumerate(items, start=1)], warnings


def comparison_key(content: str) -> str:
    """The same for texts that differ in case, blanks and the mark at the end only."""
    plain = normalized("NFKC", content).casefold()
    return " ".join(plain.split()).rstrip(".!。 ")


def _items(text: str) -> Sequence[Any]:
    if text.startswith("{"):
        members = load_object(text)
        listed = members.get(_WRAPPED)
        if not isinstance(listed, list):
            raise ValueError("expected a JSON array, got an object")
        return listed
    if not text.startswith("["):
        raise ValueError(f"expected a JSON array, got {first_line(text, 60)!r}" if text else "it is empty")
    members = load_object(f'{{"{_WRAPPED}":{text}}}')
    if set(members) != {_WRAPPED}:
        raise ValueError("something follows the JSON array")
    listed = members[_WRAPPED]
    if not isinstance(listed, list):
        raise ValueError("expected a JSON array")  # noqa: TRY004 (one kind of refusal for whoever catches it)
    return listed


def _candidate(item: Any, number: int, warnings: list[ParseWarning]) -> Candidate:
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"item {number} is no object with a content that is text")
    if len(content) > MAX_CONTENT_CHARS:
        warnings.append(ParseWarning(number, f"content has more than {MAX_CONTENT_CHARS:,} characters"))
    return Candidate(
        content=" ".join(content.split())[:MAX_CONTENT_CHARS],
        kind=_kind(item.get("type"), number, warnings),
        importance=_importance(item.get("importance"), number, warnings),
        sources=tuple(seq for seq in _listed(item.get("sources")) if isinstance(seq, int)),
        entities=tuple(_entities(item.get("entities")))[:MOST_NAMES],
        relations=tuple(_relations(item.get("relations")))[:MOST_NAMES],
    )


def _kind(given: Any, number: int, warnings: list[ParseWarning]) -> MemoryKind:
    if isinstance(given, str) and given in set(MemoryKind):
        return MemoryKind(given)
    warnings.append(ParseWarning(number, f"type must be one of {', '.join(MemoryKind)}"))
    return MemoryKind.FACT


def _importance(given: Any, number: int, warnings: list[ParseWarning]) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        warnings.append(ParseWarning(number, "importance must be a number from 0 to 1"))
        return _DEFAULT_IMPORTANCE
    if not 0 <= given <= 1:
        warnings.append(ParseWarning(number, f"importance is {first_line(str(given), 20)}, and must be from 0 to 1"))
    return float(min(max(given, 0), 1))


def _entities(given: Any) -> Iterator[Entity]:
    for each in _listed(given):
        if isinstance(each, dict) and (name := _name(each.get("name"))):
            yield Entity(name, _name(each.get("type")).lower() or "thing")


def _relations(given: Any) -> Iterator[Relation]:
    for each in _listed(given):
        if isinstance(each, dict):
            subject, relation, other = (_name(each.get(part)) for part in ("subject", "relation", "object"))
            if subject and relation and other:
                yield Relation(subject, relation.lower().replace(" ", "_"), other)


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _name(given: Any) -> str:
    """A name on one line; nothing if it is none, or too long for one."""
    plain = " ".join(given.split()) if isinstance(given, str) else ""
    return plain if len(plain) <= MAX_NAME_CHARS else ""


def _without_fence(text: str) -> str:
    # No pattern: one that tries every end of a run of blanks takes hours over a reply of megabytes.
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    return text.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
