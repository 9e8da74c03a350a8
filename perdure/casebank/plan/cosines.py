"""The cosine that decides whether two cases are duplicates.

Each sum is correctly rounded, so the cosine does not depend on the order of the two vectors. Vectors are stored as
float32; the product of two float32 numbers is exact in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_HEADER_BYTES = 4

Vector = NDArray[np.float32]
"""`(d,)` float32."""


def from_wire(sent: bytes | memoryview) -> Vector:
    """A vector from the output of pgvector's `vector_send`: a header of four bytes, then big-endian float32."""
    return np.frombuffer(sent, dtype=">f4", offset=_HEADER_BYTES).astype(np.float32)


def has_direction(vector: Vector) -> bool:
    """Whether the cosine of the vector is defined: all numbers are finite, and at least one is not 0."""
    return bool(np.all(np.isfinite(vector)) and np.any(vector))


def cosine(left: Vector, right: Vector) -> float:
    """The cosine of two vectors, from -1 to 1. Both must have the same dimensions and pass `has_direction`."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    squares = math.fsum((a * a).tolist()) * math.fsum((b * b).tolist())
    return max(-1.0, min(1.0, math.fsum((a * b).tolist()) / math.sqrt(squares)))
