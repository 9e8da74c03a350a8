"""The embedder protocol, and the part of a question that is embedded.

Vectors are compared only if they have the same embedder and equal dimensions. Each vector is therefore stored with its
embedder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from perdure.errors import InvalidResponse
from perdure.models.protocol import ModelCall
from perdure.text.untrusted import first_line, storable

Vector = list[float]
"""A vector of length 1: the inner product of two vectors is their cosine similarity."""

_SHOWN_CHARS = 100

MAX_QUERY_CHARS = 2_000
"""Maximum characters of a query. Of a longer query, only the first 1,000 and the last 1,000 are used."""


class Embedder(Protocol):
    """Makes vectors of texts. Threads may share it."""

    @property
    def name(self) -> str:
        """The name as in `PERDURE_EMBEDDER`, such as `hash:384`."""
        ...

    @property
    def dimensions(self) -> int | None:
        """The number of elements of each vector; `None` if it is unknown before the first vector."""
        ...

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text, in the order of `texts`.

        The call must finish by the deadline of `call`. Without `call`, the embedder's own deadline applies.

        Raises:
            CallAborted: the engine aborted the call.
            DeadlineExceeded: the deadline passed.
            RateLimited, InvalidResponse, ProviderError: the provider failed.
        """
        ...


class EmbedderWrapper:
    """Has the name and the dimensions of an embedder."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    @property
    def name(self) -> str:
        return self._embedder.name

    @property
    def dimensions(self) -> int | None:
        return self._embedder.dimensions


class LearnedDimensions:
    """The dimensions of an embedder, known from its first vector. Later vectors must have equal dimensions."""

    def __init__(self) -> None:
        self.dimensions: int | None = None

    def check(self, values: object) -> Vector:
        """Check a provider's vector, and return it scaled to length 1.

        Raises:
            InvalidResponse: `values` is not a vector, is zero or not finite, or differs in dimensions from earlier
                vectors.
        """
        if not isinstance(values, list) or not values or not all(isinstance(each, int | float) for each in values):
            raise InvalidResponse(f"The embedder's server sent {_described(values)} for a vector.")
        self.dimensions = self.dimensions or len(values)
        if len(values) != self.dimensions:
            raise InvalidResponse(
                f"The embedder returned a vector of {len(values)} dimensions after vectors of {self.dimensions}."
            )
        return unit(values)


def _described(values: object) -> str:
    if isinstance(values, list):
        wrong = next((each for each in values if not isinstance(each, int | float)), None)
        return "an empty list" if not values else f"a list with {first_line(repr(wrong), _SHOWN_CHARS)}"
    return "nothing" if values is None else first_line(repr(values), _SHOWN_CHARS)


def in_batches(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))


def unit(values: Sequence[float]) -> Vector:
    """`values` scaled to length 1.

    Raises:
        InvalidResponse: all values are zero, or one is not finite.
    """
    try:
        length = math.hypot(*values)
    except OverflowError:  # an integer too large for a float
        length = math.inf
    if not 0 < length < math.inf:
        raise InvalidResponse("The embedder returned a vector that is zero or not finite.")
    return [value / length for value in values]


def embedded_text(query: str) -> str:
    """The part of a query that a search uses (see `MAX_QUERY_CHARS`)."""
    text = storable(query)
    if len(text) <= MAX_QUERY_CHARS:
        return text
    half = MAX_QUERY_CHARS // 2
    return f"{text[:half]} {text[-half:]}"
