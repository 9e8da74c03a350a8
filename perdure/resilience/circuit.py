"""The circuit breaker as a pure state machine.

    closed ── consecutive failures reach the threshold ──▶ open
    open ── a call after the cooldown ──▶ half_open
    half_open ── a probe succeeds ──▶ closed
    half_open ── a probe fails ──▶ open
    any ── reset ──▶ closed

Each change of state begins an epoch. The outcome of a call changes the state only in the epoch in which the call was
admitted. For example, a call that was admitted before the circuit opened does not close the circuit. An epoch's number
is the time at which the epoch began. If Redis loses a circuit, the new circuit therefore does not reuse an old number.

A probe is a call that a half-open circuit admits. Each probe holds one slot of the circuit until the call ends or the
probe's lease expires. The expiry frees the slots of a process that crashed.

Callers pass times as milliseconds since 1970. `redis_circuits.py` implements the same machine in Lua; a property test
compares the two implementations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import assert_never

from perdure.settings import BreakerSettings


class CircuitState(StrEnum):
    """The state of a circuit: `CLOSED` admits all calls, `OPEN` admits none, `HALF_OPEN` admits a few probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CallOutcome(StrEnum):
    """How an admitted call ended.

    A `RELEASED` call is neither a success nor a failure: it was cancelled, or its request was invalid.
    """

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Policy:
    """When a circuit opens, how long it stays open, and how many concurrent probes it admits while half-open."""

    failure_threshold: int
    cooldown_ms: int
    half_open_max_probes: int

    @classmethod
    def of(cls, settings: BreakerSettings) -> Policy:
        cooldown_ms = max(1, round(settings.cooldown_s * 1_000))
        return cls(settings.failure_threshold, cooldown_ms, settings.half_open_max_probes)


@dataclass(frozen=True, slots=True)
class Circuit:
    """The state of one breaker.

    `failures` counts consecutive failures. `successes` counts all successes. `probes` maps the id of each running probe
    to the time at which its lease ends.
    """

    epoch: int
    state: CircuitState = CircuitState.CLOSED
    failures: int = 0
    successes: int = 0
    last_failure_ms: int | None = None
    opened_at_ms: int | None = None
    probes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admission:
    """Permission for one call. If the call is a probe, `id` identifies its slot."""

    id: str
    epoch: int


def admit(circuit: Circuit, policy: Policy, now: int, call_id: str, lease_ms: int) -> tuple[Circuit, Admission | None]:
    """Admit a call if the circuit allows it. Returns the new circuit, and the admission or `None`.

    If the call `call_id` already holds a probe's slot, it keeps the slot.
    """
    if circuit.state is CircuitState.OPEN and _cooldown_is_over(circuit, policy, now):
        circuit = _move(circuit, CircuitState.HALF_OPEN, now)
    match circuit.state:
        case CircuitState.CLOSED:
            return circuit, Admission(call_id, circuit.epoch)
        case CircuitState.OPEN:
            return circuit, None
        case CircuitState.HALF_OPEN:
            alive = {each: end for each, end in circuit.probes.items() if end > now}
            if call_id not in alive and len(alive) >= policy.half_open_max_probes:
                return replace(circuit, probes=alive), None
            probing = replace(circuit, probes={**alive, call_id: now + lease_ms})
            return probing, Admission(call_id, circuit.epoch)
        case _:
            assert_never(circuit.state)


def settle(circuit: Circuit, policy: Policy, now: int, admission: Admission, outcome: CallOutcome) -> Circuit:
    """The circuit after the outcome of an admitted call.

    If the call was admitted in an earlier epoch, a success changes only `successes`, and a failure changes only
    `last_failure_ms`.
    """
    present = admission.epoch == circuit.epoch
    match outcome:
        case CallOutcome.SUCCEEDED:
            noted = replace(circuit, successes=circuit.successes + 1)
            return _after_success(noted, now) if present else noted
        case CallOutcome.FAILED:
            noted = replace(circuit, last_failure_ms=now)
            return _after_failure(noted, policy, now) if present else noted
        case CallOutcome.RELEASED:
            left = {each: end for each, end in circuit.probes.items() if each != admission.id}
            return replace(circuit, probes=left) if present else circuit
        case _:
            assert_never(outcome)


def reset(circuit: Circuit, now: int) -> Circuit:
    """Close the circuit at an operator's request. Calls that were admitted earlier cannot change the new state."""
    return _move(replace(circuit, failures=0), CircuitState.CLOSED, now)


def lets_through_at(circuit: Circuit, policy: Policy) -> int | None:
    """The latest time at which a circuit that refuses calls admits a call again.

    For an open circuit, this is the end of the cooldown. For a half-open circuit, it is the time at which the first
    lease of a probe expires. Returns `None` if the circuit is closed, or half-open without probes.
    """
    if circuit.state is CircuitState.OPEN:
        return (circuit.opened_at_ms or 0) + policy.cooldown_ms
    return min(circuit.probes.values(), default=None)


def _after_success(circuit: Circuit, now: int) -> Circuit:
    healthy = replace(circuit, failures=0)
    return _move(healthy, CircuitState.CLOSED, now) if circuit.state is CircuitState.HALF_OPEN else healthy


def _after_failure(circuit: Circuit, policy: Policy, now: int) -> Circuit:
    failing = replace(circuit, failures=circuit.failures + 1)
    opens = circuit.state is CircuitState.HALF_OPEN or failing.failures >= policy.failure_threshold
    return _move(failing, CircuitState.OPEN, now) if opens else failing


def _cooldown_is_over(circuit: Circuit, policy: Policy, now: int) -> bool:
    """Whether the cooldown is over, or the clock was set back to a time before the circuit opened."""
    opened_at = circuit.opened_at_ms or 0
    return not opened_at <= now < opened_at + policy.cooldown_ms


def _move(circuit: Circuit, state: CircuitState, now: int) -> Circuit:
    """The circuit in `state`, in a new epoch."""
    opened_at = {CircuitState.CLOSED: None, CircuitState.OPEN: now, CircuitState.HALF_OPEN: circuit.opened_at_ms}[state]
    return replace(circuit, epoch=max(circuit.epoch + 1, now), state=state, opened_at_ms=opened_at, probes={})
