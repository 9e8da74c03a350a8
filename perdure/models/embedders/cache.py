"""A cache of vectors in memory, so that the provider embeds a repeated text only once."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from perdure.models.embedders.protocol import Embedder, EmbedderWrapper, Vector
from perdure.models.protocol import ModelCall

MAX_FLOATS = 2_000_000
"""Maximum four-byte floats in the cache: 5,208 vectors of 384 dimensions."""


class CachedEmbedder(EmbedderWrapper):
    """An embedder with an LRU cache. Threads may share it.

    Vectors are rounded to four-byte floats, as in PostgreSQL, so that cached and new vectors are equal.
    """

    def __init__(self, embedder: Embedder, max_floats: int = MAX_FLOATS) -> None:
        super().__init__(embedder)
        self._max_floats = max_floats
        self._lock = threading.Lock()
        self._cached: OrderedDict[bytes, array[float]] = OrderedDict()
        self._floats = 0

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Only texts that are not cached are embedded; see `Embedder.embed`."""
        keys = [_key(each) for each in texts]
        found = self._lookup(keys)
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        if missing:
            vectors = self._embedder.embed(list(missing.values()), call)
            new = {key: array("f", vector) for key, vector in zip(missing, vectors, strict=True)}
            self._store(new.items())
            found |= new
        return [found[key].tolist() for key in keys]

    def _lookup(self, keys: Iterable[bytes]) -> dict[bytes, array[float]]:
        with self._lock:
            found = {key: self._cached[key] for key in keys if key in self._cached}
            for key in found:
                self._cached.move_to_end(key)
        return found

    def _store(self, new: Iterable[tuple[bytes, array[float]]]) -> None:
        with self._lock:
            for key, vector in new:
                if key not in self._cached:
                    self._floats += len(vector)
                self._cached[key] = vector
            while self._floats > self._max_floats:
                self._floats -= len(self._cached.popitem(last=False)[1])


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
