"""The embedder protocol, and the part of a question that is embedded.

Vectors are compared within one embedder and size only, so each is stored with its embedder's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from perdure.errors import InvalidResponse
from perdure.models.protocol import ModelCall
from perdure.text.untrusted import storable

Vector = list[float]
"""Of length 1, so that the inner product of two is the cosine of the angle between them."""

MAX_QUERY_CHARS = 2_000
"""Characters of a query that are searched: of a longer one, half from its beginning and half from its end."""


class Embedder(Protocol):
    """Makes a vector of each text. Threads may share it."""

    @property
    def name(self) -> str:
        """As in `PERDURE_EMBEDDER`, such as `hash:384`."""
        ...

    @property
    def dimensions(self) -> int | None:
        """Numbers in each vector; None if that is only known from the first one."""
        ...

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text, in the same order.

        The whole of it ends with `call`, if one is given; else by the embedder's own deadline.

        Raises:
            CallAborted: the engine ended the call.
            DeadlineExceeded: the deadline passed.
            RateLimited, InvalidResponse, ProviderError: as the provider failed.
        """
        ...


class LearnedDimensions:
    """The dimensions of an embedder, learnt from its vectors, which must all be alike."""

    def __init__(self) -> None:
        self.dimensions: int | None = None

    def take(self, values: object) -> Vector:
        """What a provider gave for a text as a vector of length 1.

        Raises:
            InvalidResponse: it is no vector, has no direction, or other dimensions than those before.
        """
        if not isinstance(values, list) or not values or not all(isinstance(each, int | float) for each in values):
            raise InvalidResponse("The embedder's server sent something that is no vector.")
        self.dimensions = self.dimensions or len(values)
        if len(values) != self.dimensions:
            raise InvalidResponse(
                f"The embedder gave a vector of {len(values)} dimensions after some of {self.dimensions}."
            )
        return unit(values)


def in_batches(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """`texts` in order, `size` at a time."""
    return (texts[start : start + size] for start in range(0, len(texts), size))


def unit(values: Sequence[float]) -> Vector:
    """`values` scaled to length 1.

    Raises:
        InvalidResponse: they have no direction: all are zero, or one is no finite number.
    """
    try:
        length = math.hypot(*values)
    except OverflowError:  # a whole number beyond all floats
        length = math.inf
    if not 0 < length < math.inf:
        raise InvalidResponse("The embedder gave a vector without a direction.")
    return [value / length for value in values]


def embedded_text(query: str) -> str:
    """The part of a query that is searched and embedded: see `MAX_QUERY_CHARS`."""
    text = storable(query)
    if len(text) <= MAX_QUERY_CHARS:
        return text
    half = MAX_QUERY_CHARS // 2
    return f"{text[:half]} {text[-half:]}"
