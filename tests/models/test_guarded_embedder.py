"""Transient failures of an embedder are retried. Repeated failures open the embedder's circuit breaker."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from perdure.clock import MovedClock
from perdure.errors import CircuitBreakerOpen, InvalidRequest, ProviderError
from perdure.models.embedders.guarded import guard_with
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import ModelCall
from perdure.resilience.registry import Breakers
from perdure.settings import RetrySettings, Settings


class _Failing:
    """An embedder that fails `times` times with `error`, and then returns vectors."""

    name = "openai:small"
    dimensions = 1

    def __init__(self, error: Exception, times: int) -> None:
        self.left = times
        self.calls = 0
        self._error = error

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        assert call is not None
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self._error
        return [[1.0] for _ in texts]


@pytest.fixture
def quick(settings: Settings) -> Settings:
    """Settings with a pause of at most a millisecond before a retry."""
    return settings.model_copy(update={"retry": RetrySettings(base_s=0.001, cap_s=0.001)})


def test_a_transient_failure_is_retried(quick: Settings, clock: MovedClock) -> None:
    """A transient failure is retried, and the caller receives the vectors."""
    failing = _Failing(ProviderError("unavailable", transient=True), 2)
    guarded = guard_with(Breakers(quick.breaker, clock), quick, clock)(failing)
    assert guarded.embed(["a", "b"]) == [[1.0], [1.0]]
    assert (failing.calls, guarded.name, guarded.dimensions) == (3, "openai:small", 1)


def test_repeated_failures_open_the_breaker(quick: Settings, clock: MovedClock) -> None:
    """Repeated failures open the breaker. A failed call and its retries count as one failure."""
    breakers = Breakers(quick.breaker, clock)
    failing = _Failing(ProviderError("unavailable", transient=True), 1000)
    guarded = guard_with(breakers, quick, clock)(failing)
    for _ in range(quick.breaker.failure_threshold):
        with pytest.raises(ProviderError):
            guarded.embed(["a"])
    calls = failing.calls
    with pytest.raises(CircuitBreakerOpen):
        guarded.embed(["a"])
    assert failing.calls == calls == quick.breaker.failure_threshold * quick.retry.max_attempts
    assert [(each.name, each.state) for each in breakers.list()] == [("embed:openai:small", "open")]


def test_a_refusal_does_not_open_the_breaker(quick: Settings, clock: MovedClock) -> None:
    """An embedder's refusal of a text does not open the breaker, because another text may succeed."""
    failing = _Failing(InvalidRequest("too long"), 10)
    guarded = guard_with(Breakers(quick.breaker, clock), quick, clock)(failing)
    for _ in range(10):
        with pytest.raises(InvalidRequest):
            guarded.embed(["a"])
    assert failing.calls == 10
    assert guarded.embed(["a"]) == [[1.0]]


def test_the_built_in_embedder_is_not_guarded(quick: Settings, clock: MovedClock) -> None:
    """The built-in embedder has no breaker, because it calls no server."""
    built_in = HashEmbedder(64)
    assert guard_with(Breakers(quick.breaker, clock), quick, clock)(built_in) is built_in
