"""An embedder with a circuit breaker and retries: `breaker(retry(embed))`, as for models.

The breaker's name is `embed:` plus the embedder's name, such as `embed:openai:NAME`. The built-in embedders cannot
fail and have no breaker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from perdure.clock import Clock
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Embedder, EmbedderWrapper, Vector
from perdure.models.embedders.resolve import Guard
from perdure.models.embedders.static import StaticEmbedder
from perdure.models.protocol import ModelCall
from perdure.models.resilient import CallWindow, wait_within
from perdure.resilience.registry import Breaker, BreakerRegistry
from perdure.resilience.retry import retrying
from perdure.settings import Settings


class GuardedEmbedder(EmbedderWrapper):
    """An embedder behind a circuit breaker. Calls are retried after transient failures."""

    def __init__(self, embedder: Embedder, breaker: Breaker, settings: Settings, clock: Clock) -> None:
        super().__init__(embedder)
        self._breaker = breaker
        self._settings = settings
        self._clock = clock

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text; see `Embedder.embed`.

        Raises:
            CircuitBreakerOpen: the breaker is open.
        """
        whole = call or ModelCall(self._clock, self._settings.model_timeout_s)
        with whole.part(self._settings.model_timeout_s) as part:
            return self._breaker.execute(lambda: self._try_until(texts, part), part.remaining())

    def _try_until(self, texts: Sequence[str], part: ModelCall) -> list[Vector]:
        window = CallWindow(part, wait_within)
        return retrying(
            self.name, lambda: self._embedder.embed(texts, part), self._settings.retry, window, random.random
        )


def guard_with(breakers: BreakerRegistry, settings: Settings, clock: Clock) -> Guard:
    """Make a function for `resolve` that wraps an embedder in a circuit breaker and retries."""

    def guard(embedder: Embedder) -> Embedder:
        if isinstance(embedder, HashEmbedder | StaticEmbedder):
            return embedder
        breaker = breakers.get(f"embed:{embedder.name}")
        return GuardedEmbedder(embedder, breaker, settings, clock)

    return guard
