"""Reads values of untrusted JSON: a value of the wrong type becomes an empty value.

The wire modules read replies with these functions, so a field of the wrong type counts as missing. A missing
count is `None`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.text import untrusted
from perdure.text.patterns import compiled

_COUNT = compiled(r"[0-9]{1,10}")


def as_string(value: object) -> str:
    return value if isinstance(value, str) else ""


def as_count(value: object) -> int | None:
    """`value` if it is a non-negative whole number that fits PostgreSQL's type `integer`, else `None`.

    Some servers send counts as strings or as floats.

    >>> as_count("12"), as_count(12.0), as_count(-1)
    (12, 12, None)
    """
    number = int(value) if isinstance(value, str) and _COUNT.fullmatch(value) else untrusted.whole(value)
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31 else None


def as_object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_array(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def object_in(text: str) -> dict[str, Any]:
    """The JSON object that a call's arguments are; empty if they are anything else, which providers refuse."""
    try:
        return untrusted.load_object(text)
    except ValueError:
        return {}


def documents(body: bytes) -> list[Any]:
    """The JSON values of a body: one, or one in each line.

    Raises:
        ValueError, RecursionError: the body is something else.
    """
    try:
        return [json.loads(body)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in body.splitlines() if line.strip()]
