"""`sentence-transformers:NAME-OR-DIRECTORY`: a model of the library sentence-transformers, run in this process.

The library is an extra (`pip install 'perdure[sentence-transformers]'`), because it needs PyTorch. The library
downloads a named model once; a directory needs no network. Each process that embeds loads the model into memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from perdure.clock import Clock
from perdure.errors import ProviderError, SettingsError
from perdure.models.embedders.protocol import LearnedDimensions, Vector, in_batches
from perdure.models.protocol import ModelCall

BATCH = 32
"""Texts between two checks of the deadline; also the library's default batch size."""


class SentenceTransformersEmbedder:
    """One model in memory. Threads may share it, but only one thread at a time embeds texts."""

    def __init__(self, model: str, clock: Clock, timeout_s: float) -> None:
        """Load the model, which takes seconds.

        Raises:
            SettingsError: the extra is not installed, or the library cannot load the model.
        """
        self._model = model
        self._clock = clock
        self._timeout_s = timeout_s
        self._dimensions = LearnedDimensions()
        self._lock = threading.Lock()
        self._transformer = _load(self.name, model)

    @property
    def name(self) -> str:
        return f"sentence-transformers:{self._model}"

    @property
    def dimensions(self) -> int | None:
        return self._dimensions.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Raises the errors of `Embedder.embed`.

        The library cannot be interrupted: the deadline and an abort are checked between batches.
        """
        call = call or ModelCall(self._clock, self._timeout_s)
        return [vector for batch in in_batches(texts, BATCH) for vector in self._encode(batch, call)]

    def _encode(self, texts: Sequence[str], call: ModelCall) -> list[Vector]:
        # The tokenizers are not thread-safe, and PyTorch uses all processors for one call.
        acquired = self._lock.acquire(timeout=call.remaining())
        try:
            if not acquired:
                call.expire()
            call.remaining()
            encoded = self._transformer.encode(list(texts), batch_size=BATCH, show_progress_bar=False)
        except RuntimeError as error:  # PyTorch: out of memory, unsupported operation
            raise ProviderError("The embedder failed.", transient=False) from error
        finally:
            if acquired:
                self._lock.release()
        return [self._dimensions.check(each) for each in encoded.tolist()]


def _load(name: str, model: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: it needs the extra sentence-transformers, "
            f"pip install 'perdure[sentence-transformers]' ({error})"
        ) from error
    try:
        return SentenceTransformer(model)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: accepted: a model's name on the library's hub or its directory; "
            f"this one cannot be loaded: {error}"
        ) from error
