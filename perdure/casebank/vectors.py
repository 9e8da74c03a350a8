"""Vectors, checked when they come in. Their arithmetic is in `cosines`, which takes longer to import."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from perdure.errors import InvalidRequest

MOST_DIMENSIONS = 16_000
"""What pgvector's type `vector` holds."""

_LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_SMALLEST = struct.unpack("<f", b"\x01\x00\x00\x00")[0]
"""Of the numbers that a float32 holds, beside zero: half of it and less becomes zero."""


def literal(values: Sequence[float], dimensions: int | None = None) -> str:
    """`values` as a parameter for `::vector`.

    Raises:
        InvalidRequest: they are no vector, have no direction or another size; the message says which.
    """
    if not 1 <= len(values) <= MOST_DIMENSIONS:
        raise InvalidRequest(f"The vector has {len(values)} dimensions; accepted: 1 to {MOST_DIMENSIONS:,}.")
    if dimensions is not None and len(values) != dimensions:
        raise InvalidRequest(f"The vector has {len(values)} dimensions, its embedder's have {dimensions}.")
    if not all(math.isfinite(value) and abs(value) <= _LARGEST for value in values):
        raise InvalidRequest("The vector holds NaN, infinity, or a number that is no float32.")
    if all(abs(value) <= _SMALLEST / 2 for value in values):
        raise InvalidRequest("The vector has no length: all of its numbers are zero.")
    return f"[{','.join(map(repr, map(float, values)))}]"
