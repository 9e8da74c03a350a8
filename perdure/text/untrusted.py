"""Text from outside, as models and tools give it: strict JSON in, storable text out.

What a model writes as a tool's arguments is untrusted: `json.loads` alone would let through
NaN, duplicate keys (the last one wins, silently) and text that PostgreSQL refuses. What a
tool returns is no better: it may be no JSON, hold NUL, or be a hundred megabytes long. Nothing of
this may wedge a session, and nothing that is too long is copied before it is cut.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any, NoReturn

from pydantic_core import ErrorDetails, PydanticSerializationError, to_jsonable_python

from perdure.text.patterns import compiled

MAX_DEPTH = 64
"""Levels of nesting that arguments may have; far below what the interpreter's stack bears."""

MAX_DIGITS = 4_300
"""Digits that a whole number may have; Python itself converts no more, lest it be stalled."""

_FIRST_CHARS = 10_000
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can store `text`: no NUL, no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\x00" not in text


STORABLE_PATTERN = r"^[^\u0000]*$"
"""Texts that `is_storable`, as a pattern of JSON Schema; JSON Schema knows no halves of surrogate pairs."""

_BLANKS = r"\u0009-\u000d\u001c-\u0020\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""The characters that `str.strip` removes; the `\\s` of JSON Schema's patterns is another set."""

NOT_BLANK_PATTERN = rf"^[^\u0000]*[^\u0000{_BLANKS}][^\u0000]*$"
"""Texts that `is_storable` and that `str.strip` leaves something of, as a pattern of JSON Schema."""


def whole(value: object) -> object:
    """`value`; as an `int` if it is a float without a fraction, which JSON Schema counts as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def storable(text: str) -> str:
    """`text` as PostgreSQL can store it.

    The two halves of a character that came in two pieces are joined; NUL and halves without
    their other half become U+FFFD.
    """
    if is_storable(text):
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return joined.replace("\x00", _REPLACEMENT)


def load_object(text: str) -> dict[str, Any]:
    """Parse one JSON object, more strictly than `json.loads`; blank text means `{}`.

    Raises:
        ValueError: it is no JSON object, or holds what no argument may; the message says which.
    """
    if not text.strip():
        return {}
    try:
        value = _STRICT.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError(  # noqa: TRY004 (one kind of refusal for whoever catches it)
            f"expected a JSON object, got {_JSON_NAMES.get(type(value), 'something else')}"
        )
    _check(value)
    return value


def dump(value: Any, limit: int) -> str:
    """`value` as text of at most `limit` characters for a model: a string as it is, anything else as JSON.

    Of a value that is larger, no more than `limit` characters and items are read.

    Raises:
        ValueError: it has no JSON form; the message says why.
    """
    if isinstance(value, str):
        return storable(str(cut(value, limit)))
    part = _Part(limit)
    try:
        text = json.dumps(part.of(value), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError, PydanticSerializationError) as error:
        raise ValueError(first_line(str(error))) from error
    return storable(_within(text, limit, f"over {limit:,}") if part.room < 0 else cut(text, limit))


def is_identifier(name: str) -> bool:
    """Whether `name` may name a channel or a bank of cases: `IDENTIFIER`, in ASCII."""
    return _IDENTIFIER.fullmatch(name) is not None


def identifier(name: str) -> str:
    """`name`, for a pydantic field.

    Raises:
        ValueError: it is no identifier.
    """
    if not is_identifier(name):
        raise ValueError(f"must be {IDENTIFIER}")
    return name


def shown_channel(name: str) -> str:
    """A channel's name for a prompt; rows of earlier releases may hold other text, which is not shown."""
    return f"'{name}'" if is_identifier(name) else "another channel"


def cut(text: str, limit: int) -> str:
    """`text` within `limit` characters; what was cut off is said at its end."""
    return text if len(text) <= limit else _within(text, limit, f"{len(text):,}")


def _within(text: str, limit: int, total: str) -> str:
    mark = f"\n[cut: {total} characters in all, the first {limit:,} at most are shown]"
    return text[: max(0, limit - len(mark))] + mark


class _Part:
    """Copies the beginning of a value for JSON: at most `room` characters of strings and items. Below 0 it is cut."""

    def __init__(self, room: int) -> None:
        self.room = room

    def of(self, value: Any) -> Any:
        """The part of `value` that there is room for, made of what `json` writes.

        Raises:
            PydanticSerializationError: it has no JSON form.
        """
        self.room -= 1
        match value:
            case None | int() | float():
                self.room -= value.bit_length() // 4 if isinstance(value, int) else 0  # about its digits
                return value
            case str():
                return self._text(value)
            case bytes() | bytearray():
                return self._decoded(value)
            case dict():
                return {self._key(name): self.of(each) for name, each in self._few(value.items())}
            case list() | tuple() | GeneratorType():
                return [self.of(each) for each in self._few(value)]
            case _:
                return self.of(to_jsonable_python(value))

    def _text(self, text: str) -> str:
        kept = text if len(text) <= self.room else text[: max(0, self.room)]
        self.room -= len(text)
        return kept

    def _decoded(self, data: bytes | bytearray) -> str:
        if len(data) <= self.room:
            return self._text(to_jsonable_python(bytes(data)))
        shown = bytes(data[: max(0, self.room)]).decode(errors="replace")
        self.room = -1
        return shown

    def _key(self, name: Any) -> Any:
        return self._text(name) if isinstance(name, str) else name

    def _few(self, items: Iterable[Any]) -> Iterator[Any]:
        for each in items:
            if self.room < 0:
                return
            yield each


def first_line(text: str, limit: int = 500) -> str:
    """The first line of `text` that is not blank, storable and within `limit` characters. Reads its first 10,000."""
    line = next((line.strip() for line in text[:_FIRST_CHARS].splitlines() if line.strip()), "")
    line = storable(line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def error_summary(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return first_line(f"{type(error).__name__}: {str(error)[:_FIRST_CHARS]}")


def what_is_wrong(item: ErrorDetails) -> str:
    """What pydantic found wrong with a value, for people who do not read Python."""
    kind, limits = item["type"], item.get("ctx", {})
    if kind in {"string_too_short", "too_short"} and limits.get("min_length") == 1:
        return "is empty"
    if kind in {"string_too_long", "too_long"}:
        return f"is longer than {limits['max_length']} characters"
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _PLAIN.get(kind, message)


IDENTIFIER_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$"
IDENTIFIER = "1 to 64 letters, digits and the characters _ . : -, the first a letter or a digit"
"""The same, for error messages."""

_IDENTIFIER = compiled(IDENTIFIER_PATTERN)

_PLAIN = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "string_type": "must be a string",
    "uuid_parsing": "must be a UUID",
    "uuid_type": "must be a UUID",
    "dict_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
}
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_JSON_NAMES: dict[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {first_line(text, 40)} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the number {first_line(text, 40)} has more than {MAX_DIGITS:,} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {first_line(twice, 80)!r} is given twice")
    return made


_STRICT = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_unique
)


def _check(value: Any) -> None:
    """Refuse what PostgreSQL cannot store and what is nested too deep, without recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        for each in level:
            if isinstance(each, str) and not is_storable(each):
                raise ValueError(
                    "a string contains NUL or a character that is no valid Unicode (half of a surrogate pair)"
                )
        level = [child for each in level for child in _children(each)]
    raise ValueError(_TOO_DEEP)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()
