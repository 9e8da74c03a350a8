"""Circuit breakers by name, such as `llm:openai:gpt-5`, `embed:openai:NAME`, `mcp:weather`, `tool:bank`.

While Redis is reachable, all processes of the fleet share one circuit per name. Otherwise each process has its own
circuits. A breaker refuses a call only because of its circuit's state, never because Redis fails.

`Breaker` and `BreakerRegistry` are protocols, so a program may pass its own registry. Servers and workers use a
`Switchboard`, which `resolve.py` creates.

Methods that read or reset the fleet's circuits raise `Unavailable` if Redis cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from perdure.clock import Clock
from perdure.errors import CircuitBreakerOpen, NotFound
from perdure.resilience.circuit import CallOutcome, Circuit, CircuitState, Policy
from perdure.resilience.failures import FailureKind, verdict
from perdure.resilience.redis_circuits import FleetCircuits
from perdure.resilience.shared import SharedCircuits, Transition
from perdure.resilience.stores import CircuitAnswer, OwnCircuits
from perdure.settings import REDIS_PREFIX, BreakerSettings

T = TypeVar("T")

_OUTCOMES = {
    FailureKind.TRANSIENT: CallOutcome.FAILED,
    FailureKind.PERMANENT: CallOutcome.FAILED,
    FailureKind.REFUSED: CallOutcome.RELEASED,
    FailureKind.ABANDONED: CallOutcome.RELEASED,
}


class Breaker(Protocol):
    """Admits or refuses calls to one callee."""

    def execute(self, work: Callable[[], T], lease_s: float) -> T:
        """Run `work` if the breaker admits the call. After `lease_s` seconds, the breaker may treat the call as ended.

        Raises:
            CircuitBreakerOpen: the breaker refuses the call.
            BaseException: the error of `work`.
        """
        ...


class BreakerRegistry(Protocol):
    """Breakers by name."""

    def get(self, name: str) -> Breaker:
        """The breaker called `name`, created on first use."""
        ...


class Switchboard(BreakerRegistry, Protocol):
    """A registry whose breakers operators can list and close."""

    def list(self) -> list[Metrics]:
        """All breakers, sorted by name.

        Raises:
            Unavailable: the store cannot be reached.
        """
        ...

    def reset(self, name: str) -> Metrics:
        """Close the breaker `name`.

        Raises:
            NotFound: there is no such breaker.
            Unavailable: the store cannot be reached.
        """
        ...

    def close(self) -> None:
        """Close the connections to the store. Called when the process ends."""
        ...


Listener = Callable[[Transition], None]
"""Called for each change of a breaker's state that this process caused, in the thread that caused the change."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The state of a breaker, for operators. Times are in milliseconds since 1970.

    `failure_count` counts consecutive failures. `success_count` counts all successes.
    """

    name: str
    state: CircuitState
    failure_count: int
    success_count: int
    last_failure_time: int | None
    opened_at: int | None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object for this breaker in the response of `GET /v1/breakers`."""
        return {
            "name": self.name,
            "state": self.state.value,
            "failure_count": self.failure_count,
            "success_count": self.success_count,
            "last_failure_time": self.last_failure_time,
            "opened_at": self.opened_at,
        }


class Breakers:
    """perdure's own breakers; see `Switchboard`. Thread-safe.

    `redis_url` is in kombu's or redis-py's form. If it is `None`, the circuits belong to this process. `listen` is
    called for each change of a breaker's state that this process caused.
    """

    def __init__(
        self,
        settings: BreakerSettings,
        clock: Clock,
        redis_url: str | None = None,
        listen: Listener | None = None,
        *,
        prefix: str = REDIS_PREFIX,
    ) -> None:
        policy = Policy.of(settings)
        fleet = FleetCircuits(redis_url, policy, prefix=prefix) if redis_url is not None else None
        self._enabled = settings.enabled
        self._clock = clock
        self._circuits = SharedCircuits(OwnCircuits(policy, clock), fleet, clock, listen)
        self._process, self._calls = uuid4().hex, count(1)

    def get(self, name: str) -> Breaker:
        return CircuitBreaker(name, self._circuits, self._clock, self._new_call_id) if self._enabled else Unguarded()

    def list(self) -> list[Metrics]:
        """The breakers, sorted by name.

        If Redis is configured, these are the fleet's breakers that were used in the last week. Otherwise they are this
        process's breakers.
        """
        self._circuits.exchange()
        return [_metrics(name, circuit) for name, circuit in sorted(self._circuits.store.read().items())]

    def reset(self, name: str) -> Metrics:
        """Close the breaker called `name`, for the whole fleet if Redis is configured.

        Raises:
            NotFound: there is no such breaker.
        """
        found = self._circuits.store.read().get(name) if self._circuits.reset(name) else None
        if found is None:
            raise NotFound(f"There is no breaker {name!r}.")
        return _metrics(name, found)

    def close(self) -> None:
        self._circuits.close()

    def _new_call_id(self) -> str:
        """An id of the fleet. A random one for each call would give up Python's lock for each."""
        return f"{self._process}:{next(self._calls)}"


class CircuitBreaker:
    """The breaker called `name`, whose state is in `circuits`; see `Breaker`."""

    def __init__(self, name: str, circuits: SharedCircuits, clock: Clock, new_call_id: Callable[[], str]) -> None:
        self._name = name
        self._circuits = circuits
        self._clock = clock
        self._new_call_id = new_call_id

    def execute(self, work: Callable[[], T], lease_s: float) -> T:
        """Run `work` if the circuit admits the call, and record the call's outcome; see `Breaker.execute`."""
        decision = self._circuits.admit(self._name, self._new_call_id(), max(1, round(lease_s * 1_000)))
        admission = decision.answer.admission
        if admission is None:
            raise self._refusal(decision.answer)
        outcome = CallOutcome.SUCCEEDED
        try:
            return work()
        except BaseException as error:
            outcome = _OUTCOMES[verdict(error)]
            raise
        finally:
            self._circuits.settle(self._name, admission, outcome, fleet=decision.fleet)

    def _refusal(self, answer: CircuitAnswer) -> CircuitBreakerOpen:
        """The error for a refused call. The error's `until` is a time of this process's clock, not of Redis's clock."""
        left_s = max(0, (answer.until or answer.now) - answer.now) / 1_000
        until = self._clock.now() + timedelta(seconds=left_s)
        return CircuitBreakerOpen(until=until, retry_after_s=left_s)


class Unguarded:
    """Admits every call. Used if `PERDURE_BREAKER__ENABLED` is false."""

    def execute(self, work: Callable[[], T], lease_s: float) -> T:  # noqa: ARG002 (as the protocol has it)
        return work()


def _metrics(name: str, circuit: Circuit) -> Metrics:
    return Metrics(
        name=name,
        state=circuit.state,
        failure_count=circuit.failures,
        success_count=circuit.successes,
        last_failure_time=circuit.last_failure_ms,
        opened_at=circuit.opened_at_ms,
    )
