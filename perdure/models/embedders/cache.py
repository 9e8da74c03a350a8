"""Vectors that were made already: the same text is embedded once, while it is remembered.

What is asked again and again (the question of a turn that is recalled by, a fact that is said
in each session) costs a provider's call only the first time.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import ModelCall

MAX_FLOATS = 2_000_000
"""Numbers that are remembered, of four bytes each: 5,208 vectors of 384 dimensions."""


class CachedEmbedder:
    """An embedder that remembers, least recently used first to go. Threads may share it.

    Vectors are rounded to what four bytes hold, as PostgreSQL rounds them: a remembered one is
    the same as a new one.
    """

    def __init__(self, embedder: Embedder, max_floats: int = MAX_FLOATS) -> None:
        self._embedder = embedder
        self._max_floats = max_floats
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, array[float]] = OrderedDict()
        self._floats = 0

    @property
    def name(self) -> str:
        """The embedder's."""
        return self._embedder.name

    @property
    def dimensions(self) -> int | None:
        """The embedder's."""
        return self._embedder.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text; the embedder gets to see those that are not known. See `Embedder.embed`."""
        keys = [_key(each) for each in texts]
        found = self._recall(keys)
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        if missing:
            made = self._embedder.embed(list(missing.values()), call)
            new = {key: array("f", vector) for key, vector in zip(missing, made, strict=True)}
            self._remember(new.items())
            found |= new
        return [found[key].tolist() for key in keys]

    def _recall(self, keys: Iterable[bytes]) -> dict[bytes, array[float]]:
        with self._lock:
            found = {key: self._known[key] for key in keys if key in self._known}
            for key in found:
                self._known.move_to_end(key)
        return found

    def _remember(self, new: Iterable[tuple[bytes, array[float]]]) -> None:
        with self._lock:
            for key, vector in new:
                if key not in self._known:
                    self._floats += len(vector)
                self._known[key] = vector
            while self._floats > self._max_floats:
                self._floats -= len(self._known.popitem(last=False)[1])


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
