"""Text from outside, as models and tools give it: strict JSON in, storable text out.

What a model writes as a tool's arguments is untrusted: `json.loads` alone would let through
NaN, duplicate keys (the last one wins, silently) and text that PostgreSQL refuses. What a
tool returns is no better: it may be no JSON, hold NUL, or be ten megabytes long. Nothing of
this may wedge a session.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from pydantic_core import ErrorDetails, PydanticSerializationError, to_jsonable_python

MAX_DEPTH = 64
"""Levels of nesting that arguments may have; far below what the interpreter's stack bears."""

MAX_DIGITS = 4_300
"""Digits that a whole number may have; Python itself converts no more, lest it be stalled."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can store `text`: no NUL, no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\x00" not in text


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


def dump(value: Any) -> str:
    """`value` as text for a model: a string as it is, anything else as JSON.

    Raises:
        ValueError: it has no JSON form; the message says why.
    """
    if isinstance(value, str):
        return storable(str(value))
    try:
        return storable(json.dumps(value, ensure_ascii=False, default=to_jsonable_python))
    except (TypeError, ValueError, RecursionError, PydanticSerializationError) as error:
        raise ValueError(first_line(str(error))) from error


def cut(text: str, limit: int) -> str:
    """`text` within `limit` characters; what was cut off is said at its end."""
    if len(text) <= limit:
        return text
    mark = f"\n[cut: {len(text):,} characters in all, the first {limit:,} at most are shown]"
    return text[: max(0, limit - len(mark))] + mark


def first_line(text: str, limit: int = 500) -> str:
    """The first line of `text` that is not blank, storable and within `limit` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = storable(line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def what_is_wrong(item: ErrorDetails) -> str:
    """What pydantic found wrong with a value, for people who do not read Python."""
    kind, limits = item["type"], item.get("ctx", {})
    if kind in {"string_too_short", "too_short"} and limits.get("min_length") == 1:
        return "is empty"
    if kind in {"string_too_long", "too_long"}:
        return f"is longer than {limits['max_length']} characters"
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _PLAIN.get(kind, message)


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
