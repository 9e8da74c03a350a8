"""Type checks for values of untrusted JSON: a value of the wrong type becomes an empty value.

The wire modules read replies with these functions, so a field of the wrong type counts as missing. A missing
count is `None`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def as_string(value: object) -> str:
    return value if isinstance(value, str) else ""


def as_count(value: object) -> int | None:
    """`value` if it is a non-negative integer that fits PostgreSQL's type `integer`, else `None`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def as_object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_array(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
