"""Checks of the values that an author writes in a declaration, such as an agent, a tool or an MCP server.

A wrong value is refused where it is written, so that no worker meets it in a turn. The error names the declaration, the
argument, the value and what is accepted:

    agent 'shop' has timeout_s='5'; accepted: a number of seconds above 0, or None
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from pydantic_core import SchemaError

from perdure.errors import SettingsError
from perdure.text.patterns import Pattern
from perdure.text.untrusted import first_line, is_storable

MOST = 2**31 - 1
COUNT = f"a whole number from 1 to {MOST}"
YEAR_S = 31_536_000
AMOUNT = "a number of US dollars above 0, such as 0.05"
SECONDS = "a number of seconds above 0, at most a year"

_SHOWN_CHARS = 200
_PLAIN = (str, bytes, bool, int, float, type(None))


def require(fits: bool, owner: str, argument: str, value: object, accepted: str) -> None:  # noqa: FBT001 (as assert)
    """Raise unless the value `fits`.

    Raises:
        SettingsError: the value does not fit.
    """
    if not fits:
        raise SettingsError(f"{owner} has {argument}={shown(value)}; accepted: {accepted}")


def is_text(value: object) -> bool:
    """Whether `value` is text that PostgreSQL can store."""
    return isinstance(value, str) and is_storable(value)


def is_name(value: object, longest: int) -> bool:
    """Whether `value` is one line of 1 to `longest` characters that is not blank."""
    return isinstance(value, str) and value.isprintable() and bool(value.strip()) and len(value) <= longest


def matches(value: object, pattern: Pattern, longest: int = 1_000) -> bool:
    """Whether `value` is text of at most `longest` characters that matches `pattern` as a whole."""
    return isinstance(value, str) and len(value) <= longest and pattern.fullmatch(value) is not None


def is_count(value: object) -> bool:
    """Whether `value` is a whole number from 1 to `MOST`. True and 1.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def is_amount(value: object) -> bool:
    """Whether `value` is a finite number above 0. True and "0.05" are not."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and 0 < value < MOST


def is_seconds(value: object) -> bool:
    """Whether `value` is a number above 0, and at most `YEAR_S`. True and "5" are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= YEAR_S


def is_list(value: object) -> bool:
    """Whether `value` is a list, a tuple or another sequence, but not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def is_text_by_text(value: object) -> bool:
    return maps(value, is_text)


def maps(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, Mapping) and all(is_text(key) and fits(each) for key, each in value.items())


def takes_one(value: object) -> bool:
    """Whether `value` is a function that can be called with one argument and returns a value."""
    if not callable(value) or inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        return False
    try:
        signature = inspect.signature(value)
    except ValueError:  # a builtin without a signature
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def reason(error: Exception) -> str:
    """Why pydantic makes no schema of a type, in one line without its advice for the author of a model."""
    text = str(error).partition(". Set `arbitrary_types_allowed")[0]
    # A `SchemaError`, such as that of a regular expression, has a line for each level of the schema.
    return first_line(text.strip().splitlines()[-1] if isinstance(error, SchemaError) else text)


def shown(value: object) -> str:
    """A value for an error message. An object of an unknown class is named by its class: its text may be a secret."""
    if isinstance(value, _PLAIN):
        return first_line(repr(value), _SHOWN_CHARS)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, list | tuple | set | frozenset):
        return first_line(f"[{', '.join(shown(each) for each in [*value][:10])}]", _SHOWN_CHARS)
    if isinstance(value, Mapping):
        pairs = [f"{shown(key)}: {shown(each)}" for key, each in [*value.items()][:10]]
        return first_line(f"{{{', '.join(pairs)}}}", _SHOWN_CHARS)
    return f"an object of the class {type(value).__qualname__}"
