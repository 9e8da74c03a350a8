"""A fake third-party package with breakers that only count calls, a fallback strategy, and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from perdure.clock import Clock
from perdure.errors import NotFound, ProviderError
from perdure.models.protocol import Model, ModelCall, ModelReply, ModelRequest
from perdure.models.resilient import FallbackRequest
from perdure.resilience.circuit import CircuitState
from perdure.resilience.registry import Listener, Metrics
from perdure.resilience.shared import Transition
from perdure.settings import Settings

T = TypeVar("T")


class Counting:
    """A breaker that lets every call through and counts them; see `registry.Breaker`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def execute(self, work: Callable[[], T], lease_s: float) -> T:
        assert lease_s > 0
        self.calls += 1
        return work()


class Counters:
    """A registry of `Counting` breakers; see `registry.Switchboard`."""

    def __init__(self, settings: Settings, clock: Clock, listen: Listener) -> None:
        self.settings = settings
        self.listen = listen
        self.closed = False
        self._made: dict[str, Counting] = {}

    def get(self, name: str) -> Counting:
        return self._made.setdefault(name, Counting(name))

    def list(self) -> list[Metrics]:
        return [Metrics(each.name, CircuitState.CLOSED, each.calls, 0, None, None) for each in self._made.values()]

    def reset(self, name: str) -> Metrics:
        for each in self.list():
            if each.name == name:
                self.listen(Transition(name, CircuitState.OPEN, CircuitState.CLOSED, 0, fleet=True))
                return each
        raise NotFound(f"There is no breaker {name!r}.")

    def close(self) -> None:
        self.closed = True


class OneAnswer:
    """A fallback strategy that calls `acme:up`, unless the message is "nobody knows"; see `FallbackStrategy`."""

    def __init__(self, settings: Settings, clock: Clock, guarded: Callable[[str], Model]) -> None:
        self._other = guarded("acme:up")

    def execute(self, asked: FallbackRequest, error: Exception) -> ModelReply | None:
        if asked.request.messages[-1].content == "nobody knows":
            return None
        return self._other.respond(asked.request, asked.call)


asked: list[str] = []
"""The names of the called models, in order. Each test that reads this list clears the list at its beginning."""


class Acme:
    """A model that fails unless it is `acme:up`. The failures of `acme:overloaded` are transient."""

    def __init__(self, model: str) -> None:
        self.name = f"acme:{model}"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        asked.append(self.name)
        if self.name != "acme:up":
            raise ProviderError("Acme is down.", transient=self.name == "acme:overloaded")
        return ModelReply("Acme answers.", model="up")


def model(name: str, settings: Settings, clock: Clock) -> Model:
    """The entry point `acme` in the group `perdure.models`."""
    return Acme(name)
