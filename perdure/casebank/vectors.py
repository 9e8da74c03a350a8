"""Vectors: checked when they come in, compared exactly.

The cosine of two stored vectors is computed here and nowhere else, exactly rounded sum by
sum, so that it is the same whatever came before, whichever of the two is first and however
the work was cut into blocks. What is stored is float32; products of two such numbers are
exact in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perdure.errors import InvalidRequest

MOST_DIMENSIONS = 16_000
"""What pgvector's type `vector` holds."""

_LARGEST = float(np.finfo(np.float32).max)
_HEADER_BYTES = 4

Vector = NDArray[np.float32]
"""`(d,)` float32."""


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
    if not np.any(np.asarray(values, dtype=np.float32)):
        raise InvalidRequest("The vector has no length: all of its numbers are zero.")
    return f"[{','.join(map(repr, map(float, values)))}]"


def from_wire(sent: bytes | memoryview) -> Vector:
    """A vector from what `vector_send` gives: two header words, then big-endian float32."""
    return np.frombuffer(sent, dtype=">f4", offset=_HEADER_BYTES).astype(np.float32)


def has_direction(vector: Vector) -> bool:
    """Whether it can be compared: finite, and not all zero."""
    return bool(np.all(np.isfinite(vector)) and np.any(vector))


def cosine(left: Vector, right: Vector) -> float:
    """The cosine of the angle between two vectors of one size that have a direction, from -1 to 1."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    squares = math.fsum((a * a).tolist()) * math.fsum((b * b).tolist())
    return max(-1.0, min(1.0, math.fsum((a * b).tolist()) / math.sqrt(squares)))
