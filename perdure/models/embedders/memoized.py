"""An embedder for one turn, so that recall and the search for cases embed the same question only once."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import Abandoned, PerdureError
from perdure.models.embedders.protocol import Embedder, EmbedderWrapper, Vector
from perdure.models.protocol import ModelCall


class MemoizedEmbedder(EmbedderWrapper):
    """Caches the vectors and the failures of `embedder`. The cache has no size limit, so create one object per turn."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(embedder)
        self._results: dict[tuple[str, ...], list[Vector] | PerdureError] = {}

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector per text. If an earlier call with the same texts failed, raises that call's error again."""
        key = tuple(texts)
        if key not in self._results:
            try:
                self._results[key] = self._embedder.embed(texts, call)
            except Abandoned:
                raise
            except PerdureError as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, PerdureError):
            raise result
        return result
