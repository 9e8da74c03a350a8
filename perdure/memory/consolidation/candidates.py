"""Parses a model's reply to an extraction request into candidate memories.

`parse` finds a JSON array of objects with a `content` in the reply, or rejects the reply. It corrects an invalid field
of an item, such as an importance of 7 or an unknown type, and returns a warning. After a rejection or a warning,
`extraction` repeats the request. If the last attempt ends with warnings, `extraction` keeps the corrected items,
because the content of a memory matters more than its other fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from perdure.text.json_replies import values_in, without_fence
from perdure.text.linear import normalized
from perdure.text.untrusted import first_line, load_object

MAX_CONTENT_CHARS = 1_000
MAX_NAME_CHARS = 100
MOST_NAMES = 20
"""Maximum number of entities of one memory, and maximum number of its relations."""

_DEFAULT_IMPORTANCE = 0.5
_WRAPPED = "memories"
_EARLIEST_YEAR = 1000
"""Earlier dates are ignored: models write "0001-01-01" for an unknown one."""


class MemoryKind(StrEnum):
    """The kind of a memory. The decay rate depends on the kind."""

    FACT = "fact"
    PREFERENCE = "preference"
    INSIGHT = "insight"


class Decision(StrEnum):
    """What the model says a candidate is: something new, or what it does to a known memory."""

    NEW = "new"
    SAME = "same"
    CHANGES = "changes"
    ENDS = "ends"


_NOTHING = "nothing"
"""The decision about an item that is not worth a memory, such as an instruction or small talk."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A person, place or thing that a memory mentions."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation between two entities, such as `user`, `lives_in`, `Lyon`."""

    subject: str
    relation: str
    object: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A memory that the model extracted. `sources`: the `seq` of each source message; `importance`: from 0 to 1.

    `subject` and `attribute`: whom it is about, and what of them, such as "user" and "home"; empty if unknown.
    `decision`: what it is to the memory with the number `known` of the prompt; `None` if the model decided nothing.
    `since` and `until`: the time in which it holds, as far as it is told. `is_quotation`: not the user's own word.
    """

    content: str
    kind: MemoryKind
    importance: float
    sources: tuple[int, ...] = ()
    entities: tuple[Entity, ...] = ()
    relations: tuple[Relation, ...] = ()
    subject: str = ""
    attribute: str = ""
    decision: Decision | None = None
    known: int = 0
    since: datetime | None = None
    until: datetime | None = None
    is_quotation: bool = False

    def merged_with(self, other: Candidate) -> Candidate:
        return replace(
            self,
            importance=max(self.importance, other.importance),
            sources=tuple(sorted({*self.sources, *other.sources})),
            entities=tuple(dict.fromkeys(self.entities + other.entities))[:MOST_NAMES],
            relations=tuple(dict.fromkeys(self.relations + other.relations))[:MOST_NAMES],
        )


@dataclass(frozen=True, slots=True)
class ParseWarning:
    """An invalid field of an item; `item` counts from 1."""

    item: int
    fault: str


def parse(reply: str) -> tuple[list[Candidate], list[ParseWarning]]:
    """The candidates in `reply`, with invalid fields corrected, and a warning for each correction.

    Raises:
        ValueError: the reply is not a JSON array of objects with a content; the message names the fault.
    """
    try:
        items = _items(without_fence(reply.strip()))
    except ValueError:
        found = _items_in_prose(reply)
        if found is None:
            raise
        items = found
    warnings: list[ParseWarning] = []
    found = [_candidate(item, number, warnings) for number, item in enumerate(items, start=1) if not _is_nothing(item)]
    return found, warnings


def comparison_key(content: str) -> str:
    """A key that is equal for texts that differ only in case, character width, whitespace or final punctuation."""
    normalized_text = normalized("NFKC", content).casefold()
    return " ".join(normalized_text.split()).rstrip(".!。 ")


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
        raise ValueError("expected a JSON array")  # noqa: TRY004 (all refusals are ValueErrors)
    return listed


def _items_in_prose(reply: str) -> Sequence[Any] | None:
    """The last list of memories in `reply`: drafts come before it. An empty list counts only without any other JSON."""
    values = list(values_in(reply))
    lists = [listed for value in values for listed in (value.values() if isinstance(value, dict) else [value])]
    memories = [each for each in lists if isinstance(each, list) and each and all(map(_has_content, each))]
    return memories[-1] if memories else [] if values == [[]] else None


def _has_content(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("content"), str)


def _is_nothing(item: Any) -> bool:
    return isinstance(item, dict) and item.get("decision") == _NOTHING


def _candidate(item: Any, number: int, warnings: list[ParseWarning]) -> Candidate:
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"item {number} is not an object with a content that is text")
    if len(content) > MAX_CONTENT_CHARS:
        warnings.append(ParseWarning(number, f"content has more than {MAX_CONTENT_CHARS:,} characters"))
    decision, known = _decision(item, number, warnings)
    return Candidate(
        content=" ".join(content.split())[:MAX_CONTENT_CHARS],
        kind=_kind(item.get("type"), number, warnings),
        importance=_importance(item.get("importance"), number, warnings),
        sources=tuple(seq for seq in _as_list(item.get("sources")) if type(seq) is int),
        entities=tuple(_entities(item.get("entities")))[:MOST_NAMES],
        relations=tuple(_relations(item.get("relations")))[:MOST_NAMES],
        subject=_name(item.get("subject")),
        attribute=_name(item.get("attribute")),
        decision=decision,
        known=known,
        since=_period(item.get("since"))[0],
        until=_period(item.get("until"))[1],
    )


def _decision(item: Any, number: int, warnings: list[ParseWarning]) -> tuple[Decision | None, int]:
    """The decision and the number of the known memory that it is about, 0 for none. Reads "same as 3", too."""
    value, known = item.get("decision"), item.get("known", 0)
    if value is None or value == "":
        return None, 0
    said, _, rest = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if rest.removeprefix("as ").isdecimal():
        known = int(rest.removeprefix("as "))
    if said not in set(Decision):
        warnings.append(ParseWarning(number, f"decision must be one of {', '.join(Decision)}, {_NOTHING}"))
        return None, 0
    decision = Decision(said)
    if decision is Decision.NEW:
        return decision, 0
    if isinstance(known, bool) or not isinstance(known, int) or known < 1:
        warnings.append(ParseWarning(number, f"known must be the number of the memory that it {said}"))
        return None, 0
    return decision, known


def _period(value: Any) -> tuple[datetime | None, datetime | None]:
    """The beginning of a year, month or day in UTC, and its end; two `None` if `value` is not one."""
    parts = value.split("-") if isinstance(value, str) else []
    if not parts or not all(part.isdecimal() for part in parts):
        return None, None
    try:
        year, month, day = ([int(part) for part in parts] + [1, 1])[:3]
        start = datetime(year, month, day, tzinfo=UTC)
        match len(parts) if year >= _EARLIEST_YEAR else 0:
            case 1:
                return start, start.replace(year=year + 1)
            case 2:
                return start, (start + timedelta(days=31)).replace(day=1)
            case 3:
                return start, start + timedelta(days=1)
            case _:
                return None, None
    except (ValueError, OverflowError):
        pass  # no such day: the content keeps what was said
    return None, None


def _kind(value: Any, number: int, warnings: list[ParseWarning]) -> MemoryKind:
    if isinstance(value, str) and value in set(MemoryKind):
        return MemoryKind(value)
    warnings.append(ParseWarning(number, f"type must be one of {', '.join(MemoryKind)}"))
    return MemoryKind.FACT


def _importance(value: Any, number: int, warnings: list[ParseWarning]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        warnings.append(ParseWarning(number, "importance must be a number from 0 to 1"))
        return _DEFAULT_IMPORTANCE
    if not 0 <= value <= 1:
        warnings.append(ParseWarning(number, f"importance is {first_line(str(value), 20)}, and must be from 0 to 1"))
    return float(min(max(value, 0), 1))


def _entities(value: Any) -> Iterator[Entity]:
    for each in _as_list(value):
        if isinstance(each, dict) and (name := _name(each.get("name"))):
            yield Entity(name, _name(each.get("type")).lower() or "thing")


def _relations(value: Any) -> Iterator[Relation]:
    for each in _as_list(value):
        if isinstance(each, dict):
            subject, relation, other = (_name(each.get(part)) for part in ("subject", "relation", "object"))
            if subject and relation and other:
                yield Relation(subject, relation.lower().replace(" ", "_"), other)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _name(value: Any) -> str:
    """The name `value` on one line; an empty string if `value` is not a string or is too long."""
    normalized_text = " ".join(value.split()) if isinstance(value, str) else ""
    return normalized_text if len(normalized_text) <= MAX_NAME_CHARS else ""
