"""An embedder whose model runs in this process, such as those of sentence-transformers and WordLlama."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from perdure.clock import Clock
from perdure.errors import ProviderError
from perdure.models.embedders.protocol import LearnedDimensions, Vector, in_batches
from perdure.models.protocol import ModelCall
from perdure.text.untrusted import storable

BATCH = 32
"""Texts between two checks of the deadline; also the default batch size of sentence-transformers."""


class InProcessEmbedder:
    """One model in memory. Threads may share it, but only one thread at a time embeds texts.

    `encode` returns a list of floats for each text of a batch. A `RuntimeError` is a failure, such as a lack of memory.
    """

    def __init__(self, name: str, encode: Callable[[list[str]], Any], clock: Clock, timeout_s: float) -> None:
        self.name = name
        self._encode = encode
        self._clock = clock
        self._timeout_s = timeout_s
        self._dimensions = LearnedDimensions()
        self._lock = threading.Lock()

    @property
    def dimensions(self) -> int | None:
        return self._dimensions.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Raises the errors of `Embedder.embed`.

        The library cannot be interrupted: the deadline and an abort are checked between batches.
        """
        call = call or ModelCall(self._clock, self._timeout_s)
        return [vector for batch in in_batches(texts, BATCH) for vector in self._embed(batch, call)]

    def _embed(self, texts: Sequence[str], call: ModelCall) -> list[Vector]:
        # The tokenizers are not thread-safe, and PyTorch uses all processors for one call.
        acquired = self._lock.acquire(timeout=call.remaining())
        try:
            if not acquired:
                call.expire()
            call.remaining()
            encoded = self._encode([storable(text) or " " for text in texts])  # no tokenizer takes half a character
        except RuntimeError as error:
            raise ProviderError("The embedder failed.", transient=False) from error
        finally:
            if acquired:
                self._lock.release()
        return [self._dimensions.check(each) for each in encoded]
