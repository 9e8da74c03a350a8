"""The protocol of stores for circuits (the states of circuit breakers), and a store in one process's memory.

Each change of a circuit's state is atomic. `redis_circuits.py` stores circuits in Redis, for all workers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from perdure.clock import Clock
from perdure.resilience import circuit as machine
from perdure.resilience.circuit import Admission, CallOutcome, Circuit, CircuitState, Policy


@dataclass(frozen=True, slots=True)
class CircuitAnswer:
    """The answer of a store. Times are in milliseconds of the store's own clock.

    `before` and `after` are the circuit's states before and after the request. A circuit that refuses calls admits a
    call again at `until` or earlier. `until` is `None` if the circuit refuses no calls. `admission` is set if the call
    was admitted. `leased` is the circuit's epoch, if the process may admit calls itself for the time that it asked for.
    """

    now: int
    before: CircuitState
    after: CircuitState
    failures: int
    until: int | None = None
    admission: Admission | None = None
    leased: int | None = None


class CircuitStore(Protocol):
    """A store of circuits by name. A name without a stored circuit counts as a closed circuit."""

    def admit(self, name: str, call_id: str, lease_ms: int) -> CircuitAnswer:
        """Admit or refuse a call.

        Raises:
            Unavailable: the store cannot be reached.
        """
        ...

    def settle(self, name: str, admission: Admission, outcome: CallOutcome) -> CircuitAnswer:
        """Record a call's outcome. Raises as `admit` does."""
        ...

    def reset(self, name: str) -> CircuitAnswer | None:
        """Close a circuit; returns `None` if the circuit does not exist. Raises as `admit` does."""
        ...

    def read(self) -> dict[str, Circuit]:
        """All circuits by name. Raises as `admit` does."""
        ...


MOST_OWN = 10_000
"""How many circuits a process keeps: users name the hosts of callbacks, and so the number of circuits."""


class OwnCircuits:
    """A store of circuits in this process's memory. It never fails.

    Beyond `MOST_OWN` circuits, those that were used least lately are forgotten.
    """

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._circuits: dict[str, Circuit] = {}

    def admit(self, name: str, call_id: str, lease_ms: int) -> CircuitAnswer:
        with self._lock:
            now = self._now()
            before = self._find(name, now)
            after, admission = machine.admit(before, self._policy, now, call_id, lease_ms)
            return self._keep(name, now, before, after, admission)

    def settle(self, name: str, admission: Admission, outcome: CallOutcome) -> CircuitAnswer:
        with self._lock:
            now = self._now()
            before = self._find(name, now)
            return self._keep(name, now, before, machine.settle(before, self._policy, now, admission, outcome))

    def reset(self, name: str) -> CircuitAnswer | None:
        with self._lock:
            before = self._circuits.get(name)
            now = self._now()
            return self._keep(name, now, before, machine.reset(before, now)) if before else None

    def read(self) -> dict[str, Circuit]:
        with self._lock:
            return dict(self._circuits)

    def follow(self, name: str, answer: CircuitAnswer) -> None:
        """Copy the fleet's state of the circuit `name` from `answer`, for use while Redis is unavailable.

        Copies a half-open circuit as open, because only the fleet's store records the circuit's probes.
        """
        with self._lock:
            now = self._now()
            found = self._find(name, now)
            if answer.after is CircuitState.CLOSED:
                if found.state is not CircuitState.CLOSED:
                    self._put(name, machine.reset(found, now))
                return
            left = self._policy.cooldown_ms if answer.until is None else answer.until - answer.now
            opened_at = now - max(0, self._policy.cooldown_ms - left)
            opened = Circuit(
                epoch=max(found.epoch + 1, now),
                state=CircuitState.OPEN,
                failures=answer.failures,
                successes=found.successes,
                last_failure_ms=found.last_failure_ms,
                opened_at_ms=opened_at,
            )
            self._put(name, opened)

    def _find(self, name: str, now: int) -> Circuit:
        return self._circuits.get(name) or Circuit(epoch=now)

    def _keep(
        self, name: str, now: int, before: Circuit, after: Circuit, admission: Admission | None = None
    ) -> CircuitAnswer:
        self._put(name, after)
        until = machine.lets_through_at(after, self._policy)
        return CircuitAnswer(now, before.state, after.state, after.failures, until, admission)

    def _put(self, name: str, circuit: Circuit) -> None:
        self._circuits.pop(name, None)
        self._circuits[name] = circuit
        if len(self._circuits) > MOST_OWN:
            del self._circuits[next(iter(self._circuits))]

    def _now(self) -> int:
        return int(self._clock.now().timestamp() * 1_000)
