"""Validation of incoming vectors, without numpy."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from perdure.errors import InvalidRequest

MOST_DIMENSIONS = 16_000
"""The most dimensions that pgvector's type `vector` allows."""

_LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_SMALLEST = struct.unpack("<f", b"\x01\x00\x00\x00")[0]
"""The smallest positive float32. In float32, a value of at most half this size rounds to zero."""


def literal(values: Sequence[float], dimensions: int | None = None) -> str:
    """`values` as text, which PostgreSQL casts to the type `vector`.

    Raises:
        InvalidRequest: a value is not a finite float32, all values are zero, or the number of values is wrong.
    """
    if not 1 <= len(values) <= MOST_DIMENSIONS:
        raise InvalidRequest(f"The vector has {len(values)} dimensions; accepted: 1 to {MOST_DIMENSIONS:,}.")
    if dimensions is not None and len(values) != dimensions:
        raise InvalidRequest(f"The vector has {len(values)} dimensions, its embedder's have {dimensions}.")
    if not all(math.isfinite(value) and abs(value) <= _LARGEST for value in values):
        raise InvalidRequest("The vector holds NaN, infinity, or a number outside the range of float32.")
    if all(abs(value) <= _SMALLEST / 2 for value in values):
        raise InvalidRequest("The vector has no length: all of its numbers are zero.")
    return f"[{','.join(map(repr, map(float, values)))}]"
