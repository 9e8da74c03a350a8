"""Parses JSON strictly, and makes untrusted text from models, tools and clients storable and bounded.

`json.loads` accepts NaN, duplicate keys (the last one wins) and text that PostgreSQL cannot store. A tool's result may
contain NUL, have no JSON form, or be a hundred megabytes long. These functions refuse or convert such input, so that it
cannot block a session. They cut a long text before they copy it.
"""

from __future__ import annotations

import codecs
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic_core import ErrorDetails, PydanticSerializationError, ValidationError, to_jsonable_python

from perdure.errors import InvalidRequest
from perdure.text.patterns import compiled

if TYPE_CHECKING:
    from pydantic import BaseModel

Fields = TypeVar("Fields", bound="BaseModel")

MAX_DEPTH = 64
"""Maximum levels of nesting in JSON, far below the interpreter's recursion limit."""

MAX_DIGITS = 4_300
"""Maximum digits of an integer: Python's own limit for conversions."""

OF_AUTHORS = (Exception, SystemExit, KeyboardInterrupt)
"""What an author's function may raise that runs in the thread of the turn, such as a validator.

Any other exception ends the thread. `SystemExit` comes from a function that calls the main() of a command-line program.
"""

_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_REORDERING = {code: f"\\u{code:04x}" for code in _DIRECTIONS}
"""JSON escapes of the invisible characters that change the order in which others are shown."""

_READ_CHARS = 10_000
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can store `text`: it contains no NUL and no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\x00" not in text


def checked_storable(text: str) -> str:
    """`text`, for a validator of pydantic.

    Raises:
        ValueError: PostgreSQL cannot store it.
    """
    if not is_storable(text):
        raise ValueError("contains NUL or a character that is no valid Unicode (a lone surrogate)")
    return text


STORABLE_PATTERN = r"^[^\u0000]*$"
"""A JSON Schema pattern for storable text: it excludes NUL. Valid Unicode text has no lone surrogates."""

USER_PATTERN = r"^[^\u0000\u001f]*$"
"""A JSON Schema pattern for a user's id: storable text without U+001F, which separates tenant and id in a key."""

_BLANKS = r"\u0009-\u000d\u001c-\u0020\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""The characters that `str.strip` removes. In a JSON Schema pattern, `\\s` matches a different set."""

NOT_BLANK_PATTERN = rf"^[^\u0000]*[^\u0000{_BLANKS}][^\u0000]*$"
"""A JSON Schema pattern for text that is storable and not blank."""


def whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def storable(text: str) -> str:
    """Make `text` storable: join surrogate pairs, and replace NUL and lone surrogates by U+FFFD."""
    if is_storable(text):
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return joined.replace("\x00", _REPLACEMENT)


def storable_json(value: Any) -> Any:
    """The JSON values of `value` as PostgreSQL stores them: without NUL, lone surrogates, NaN and infinities."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [storable_json(each) for each in value]
    if isinstance(value, dict):
        return {storable(name): storable_json(each) for name, each in value.items()}
    return value


def is_finite(value: Any) -> bool:
    """Whether the JSON values of `value` are without NaN and infinities."""
    if isinstance(value, float):
        return math.isfinite(value)
    return all(map(is_finite, _children(value)))


def load_object(text: str, *, any_text: bool = False) -> dict[str, Any]:
    """Parse one JSON object, more strictly than `json.loads`. Returns `{}` for blank text.

    With `any_text`, strings may be unstorable.

    Raises:
        ValueError: `text` is not a JSON object; has NaN, infinity, duplicate keys or unstorable text; or exceeds
            `MAX_DEPTH` or `MAX_DIGITS`. The message names the fault.
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
        raise ValueError(  # noqa: TRY004 (all refusals are ValueErrors)
            f"expected a JSON object, got {_JSON_NAMES.get(type(value), 'something else')}"
        )
    _check(value, any_text=any_text)
    return value


def load_value(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at `start`, as strictly as `load_object`. Returns it and the position behind it.

    Raises:
        ValueError: no such value begins there.
    """
    try:
        value, end = _STRICT.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(value)
    return value, end


def dump(value: Any, limit: int) -> str:
    """Render `value` for a model in at most `limit` characters: a string as plain text, any other value as JSON.

    Reads at most `limit` characters and items of the value, counted together.

    Raises:
        ValueError: the value cannot be converted to JSON; the message says why.
    """
    if isinstance(value, str):
        return storable(str.__str__(cut(value, limit)))  # `str` of a member of an enumeration is its name
    part = _BoundedCopy(limit)
    try:
        text = json.dumps(part.copy(value), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError, PydanticSerializationError) as error:
        raise ValueError(first_line(str(error))) from error
    return storable(_within(text, limit, f"over {limit:,}") if part.room < 0 else cut(text, limit))


def is_identifier(name: str) -> bool:
    """Whether `name` is a valid name for a channel or a bank of cases, as `IDENTIFIER` describes. Letters are ASCII."""
    return _IDENTIFIER.fullmatch(name) is not None


def identifier(name: str) -> str:
    """Validator of a pydantic field: returns `name` unchanged.

    Raises:
        ValueError: `name` is not an identifier.
    """
    if not is_identifier(name):
        raise ValueError(f"must be {IDENTIFIER}")
    return name


def shown_json(value: object, indent: int | None = None) -> str:
    """The arguments of a call as JSON for a person, who must read them in their order to approve the call."""
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_REORDERING)


def cut(text: str, limit: int) -> str:
    """Cut `text` to `limit` characters. If `text` is longer, a mark at the end states its full length."""
    return text if len(text) <= limit else _within(text, limit, f"{len(text):,}")


def _within(text: str, limit: int, total: str) -> str:
    mark = f"\n[cut: {total} characters in all, the first {limit:,} at most are shown]"
    return text[: max(0, limit - len(mark))] + mark


class _BoundedCopy:
    """Copies the beginning of a value, for conversion to JSON.

    The copy has at most `room` characters and items, counted together. If `room` is below 0 afterwards, the copy was
    cut.
    """

    def __init__(self, room: int) -> None:
        self.room = room

    def copy(self, value: Any) -> Any:
        """The beginning of `value`, converted to types that `json` writes.

        Raises:
            PydanticSerializationError: the value cannot be converted to JSON.
        """
        self.room -= 1
        match value:
            case None | int() | float():
                self.room -= value.bit_length() // 4 if isinstance(value, int) else 0  # roughly its number of digits
                return value
            case str():
                return self._text(value)
            case bytes() | bytearray():
                return self._decoded(value)
            case memoryview():
                raise ValueError(_BINARY)
            case dict():
                return {self._key(name): self.copy(each) for name, each in self._while_room(value.items())}
            case list() | tuple() | Iterator():
                return [self.copy(each) for each in self._while_room(value)]
            case _:
                return self.copy(to_jsonable_python(value))

    def _text(self, text: str) -> str:
        kept = text if len(text) <= self.room else text[: max(0, self.room)]
        self.room -= len(text)
        return kept

    def _decoded(self, data: bytes | bytearray) -> str:
        is_cut = len(data) > self.room
        part = bytes(data[: max(0, self.room)]) if is_cut else bytes(data)
        try:
            # The cut may be within a character.
            text, _ = codecs.utf_8_decode(part, "strict", not is_cut)
        except UnicodeDecodeError:
            raise ValueError(_BINARY) from None
        if is_cut:
            self.room = -1
            return text
        return self._text(text)

    def _key(self, name: Any) -> Any:
        if name is None or isinstance(name, int | float | tuple):  # `json` writes it, or refuses it
            return name
        return self._text(name if isinstance(name, str) else next(iter(to_jsonable_python({name: None}))))

    def _while_room(self, items: Iterable[Any]) -> Iterator[Any]:
        for each in items:
            if self.room < 0:
                return
            yield each


def first_line(text: str, limit: int = 500) -> str:
    """The first non-blank line of `text`, storable and cut to `limit` characters. Reads at most 10,000 characters."""
    line = next((line.strip() for line in text[:_READ_CHARS].splitlines() if line.strip()), "")
    line = storable(line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def error_summary(error: BaseException) -> str:
    return first_line(f"{type(error).__name__}: {message_of(error)[:_READ_CHARS]}")


def message_of(error: BaseException) -> str:
    """`str(error)`; a note in its place if the class of the error cannot convert it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (the error's own class raises it, and the error is what matters)
        return "its message cannot be shown"


def member_path(item: ErrorDetails, skip: int = 0) -> str:
    """The path of the member that a pydantic error is about, such as `reply_to.url`, without its first `skip` parts.

    For a union, pydantic puts the name of the tried type into the path, such as `function-after[...]`, which may hold
    the address of a Python object. Such a part is left out.
    """
    path = item["loc"][skip:]
    names_member = item["type"] in {"missing", "extra_forbidden"}
    named = [part for at, part in enumerate(path) if (names_member and at == len(path) - 1) or "[" not in str(part)]
    return first_line(".".join(map(str, named)), 200)


def what_is_wrong(item: ErrorDetails) -> str:
    """A pydantic error as a message for users who do not know Python."""
    kind, context = item["type"], item.get("ctx", {})
    if kind in {"string_too_short", "too_short"} and context.get("min_length") == 1:
        return "is empty"
    if kind in {"string_too_long", "too_long"} and "max_length" in context:
        return _TOO_LONG.get(context.get("field_type", "str"), "has more than {} items").format(context["max_length"])
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _PYDANTIC_MESSAGES.get(kind, message)


def what_is_invalid(items: Iterable[ErrorDetails], skip: int = 0) -> str:
    """All errors that pydantic found, for users who do not know Python. `skip` is as for `member_path`."""
    found = ((member_path(item, skip), what_is_wrong(item)) for item in items)
    return " ".join(f"{path}: {wrong}." if path else f"{wrong[:1].upper()}{wrong[1:]}." for path, wrong in found)


def validated(model: type[Fields], given: object) -> Fields:
    """What another program sent, as a `model`.

    Raises:
        InvalidRequest: a field is invalid; the error names the field.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise InvalidRequest(what_is_invalid(error.errors(include_input=False))) from None


IDENTIFIER_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$"
IDENTIFIER = "1 to 64 letters, digits and the characters _ . : -, the first a letter or a digit"
"""`IDENTIFIER_PATTERN` in words, for error messages."""

_IDENTIFIER = compiled(IDENTIFIER_PATTERN)

_TOO_LONG = {
    "str": "is longer than {} characters",
    "Value": "is too long: the maximum is {}",  # of any type: another validator precedes the limit
}
_PYDANTIC_MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "string_type": "must be a string",
    "uuid_parsing": "must be a UUID",
    "uuid_type": "must be a UUID",
    "dict_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
}
_BINARY = (
    "it has binary data. Return text, such as base64.b64encode(data).decode(), or store the data and "
    "return its name or address"
)
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_JSON_NAMES: dict[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
"""The names of JSON's types in error messages."""


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
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {first_line(repeated, 80)!r} is given twice")
    return parsed


_STRICT = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_unique
)


def _check(value: Any, *, any_text: bool = False) -> None:
    """Raise ValueError for unstorable strings, unless `any_text`, and for deep nesting. Does not recurse."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        for each in level:
            if not any_text and isinstance(each, str) and not is_storable(each):
                raise ValueError("a string contains NUL or a character that is not valid Unicode (a lone surrogate)")
        level = [child for each in level for child in _children(each)]
    raise ValueError(_TOO_DEEP)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()
