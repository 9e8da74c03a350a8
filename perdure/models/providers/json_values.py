"""What is read out of JSON that may be anything: the value if it is of the kind wanted, else an empty one.

A provider's reply is taken apart with these, so that a field which a server leaves out or
fills with something else is simply absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def as_string(value: object) -> str:
    """`value` if it is a string, else `""`."""
    return value if isinstance(value, str) else ""


def as_count(value: object) -> int:
    """`value` if it is a number of things that PostgreSQL's `integer` can hold, else 0."""
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0


def as_object(value: object) -> Mapping[str, Any]:
    """`value` if it is a JSON object, else `{}`."""
    return value if isinstance(value, dict) else {}


def as_array(value: object) -> Sequence[Any]:
    """`value` if it is a JSON array, else `()`."""
    return value if isinstance(value, list) else ()
