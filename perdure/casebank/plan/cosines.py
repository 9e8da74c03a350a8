"""Cosines, exactly rounded: what decides whether two cases are duplicates.

The cosine of two stored vectors is computed here and nowhere else, exactly rounded sum by
sum, so that it is the same whatever came before, whichever of the two is first and however
the work was cut into blocks. What is stored is float32; products of two such numbers are
exact in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_HEADER_BYTES = 4

Vector = NDArray[np.float32]
"""`(d,)` float32."""


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
