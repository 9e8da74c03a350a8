"""An embedder whose model runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.clock import Clock
from perdure.models.embedders.protocol import LearnedDimensions, Vector
from perdure.models.in_process import InProcess
from perdure.models.protocol import ModelCall
from perdure.text.untrusted import storable


class InProcessEmbedder:
    """One model in memory. Threads may share it. `encode` returns a list of floats for each text of a batch."""

    def __init__(self, name: str, encode: Callable[[list[str]], Any], clock: Clock, timeout_s: float) -> None:
        self.name = name
        self._model = InProcess("embedder", encode)
        self._clock = clock
        self._timeout_s = timeout_s
        self._dimensions = LearnedDimensions()

    @property
    def dimensions(self) -> int | None:
        return self._dimensions.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Raises the errors of `Embedder.embed`."""
        call = call or ModelCall(self._clock, self._timeout_s)
        given = [storable(text) or " " for text in texts]  # no tokenizer takes half a character
        return [self._dimensions.check(each) for each in self._model.run(given, call)]
