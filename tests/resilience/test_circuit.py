"""The breaker's state machine: all transitions, in Python and in Lua, and invariants for any sequence of events.

An epoch is the time between two changes of a circuit's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.clock import MovedClock
from perdure.resilience import circuit as machine
from perdure.resilience.circuit import Admission, CallOutcome, Circuit, CircuitState, Policy
from perdure.resilience.redis_circuits import FleetCircuits
from perdure.resilience.stores import CircuitAnswer, CircuitStore
from tests.resilience.conftest import POLICY

CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
NAME = "llm:test"
LEASE_MS = 20_000


@dataclass
class StoreHarness:
    """A store and its admitted calls, oldest first."""

    store: CircuitStore
    clock: MovedClock

    def __post_init__(self) -> None:
        self.admitted: list[Admission] = []
        self._ids = count()

    def ask(self) -> CircuitAnswer:
        """Request the admission of a call."""
        answer = self.store.admit(NAME, f"call {next(self._ids)}", LEASE_MS)
        if answer.admission is not None:
            self.admitted.append(answer.admission)
        return answer

    def end(self, outcome: CallOutcome, which: int = 0) -> CircuitAnswer:
        """Settle an admitted call."""
        return self.store.settle(NAME, self.admitted.pop(which), outcome)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock.advance(timedelta(seconds=seconds))

    def bring_to(self, state: CircuitState) -> None:
        """Bring a new circuit to `state`. A half-open circuit then has one running probe."""
        if state is CLOSED:
            self.ask()
            return
        for _ in range(POLICY.failure_threshold):
            self.ask()
            self.end(CallOutcome.FAILED)
        if state is HALF_OPEN:
            self.pass_time(60)
            self.ask()


Cause = Callable[[StoreHarness], CircuitAnswer | None]


def request(harness: StoreHarness) -> CircuitAnswer:
    """Request admission."""
    return harness.ask()


def request_just_before_the_cooldown_ends(harness: StoreHarness) -> CircuitAnswer:
    """Request admission a second before the cooldown ends."""
    harness.pass_time(59)
    return harness.ask()


def request_after_the_cooldown(harness: StoreHarness) -> CircuitAnswer:
    """Request admission after the cooldown. The admitted call is the first probe."""
    harness.pass_time(60)
    return harness.ask()


def request_after_the_clock_was_set_back(harness: StoreHarness) -> CircuitAnswer:
    """Request admission after the clock was set back by an hour. The circuit must not stay open an hour longer."""
    harness.pass_time(-3_600)
    return harness.ask()


def success(harness: StoreHarness) -> CircuitAnswer:
    """Settle a call of the current epoch as succeeded."""
    return harness.end(CallOutcome.SUCCEEDED)


def failure(harness: StoreHarness) -> CircuitAnswer:
    """Settle a call of the current epoch as failed."""
    return harness.end(CallOutcome.FAILED)


def release(harness: StoreHarness) -> CircuitAnswer:
    """Settle a call that was cancelled, or that the callee refused as invalid."""
    return harness.end(CallOutcome.RELEASED)


def failures_up_to_the_threshold(harness: StoreHarness) -> CircuitAnswer:
    """Settle consecutive calls as failed, up to the threshold."""
    for _ in range(POLICY.failure_threshold - 1):
        harness.ask()
        harness.end(CallOutcome.FAILED)
    return harness.end(CallOutcome.FAILED)


def failures_with_a_success_between(harness: StoreHarness) -> CircuitAnswer:
    """Settle `failure_threshold` calls as failed, and one call as succeeded before the last failure."""
    for outcome in (CallOutcome.FAILED, CallOutcome.FAILED, CallOutcome.SUCCEEDED, CallOutcome.FAILED):
        harness.ask()
        answer = harness.end(outcome)
    return answer


def late_successes(harness: StoreHarness) -> CircuitAnswer:
    """Settle calls of an earlier epoch as succeeded."""
    return _late(harness, CallOutcome.SUCCEEDED)


def late_failures(harness: StoreHarness) -> CircuitAnswer:
    """Settle `failure_threshold` calls of an earlier epoch as failed."""
    return _late(harness, CallOutcome.FAILED)


def _late(harness: StoreHarness, outcome: CallOutcome) -> CircuitAnswer:
    for _ in range(POLICY.failure_threshold):
        answer = harness.store.settle(NAME, Admission("from before", epoch=1), outcome)
    return answer


def failure_of_a_probe_whose_lease_has_expired(harness: StoreHarness) -> CircuitAnswer:
    """Settle a probe as failed after its lease expired and its slot became free. The failure still counts."""
    harness.pass_time(LEASE_MS / 1_000)
    harness.ask()
    return harness.end(CallOutcome.FAILED)


def reset(harness: StoreHarness) -> CircuitAnswer | None:
    """Reset the circuit, as an operator does."""
    return harness.store.reset(NAME)


# Every transition of the breaker, and every event that causes none.
TRANSITIONS: list[tuple[CircuitState, Cause, CircuitState]] = [
    (CLOSED, request, CLOSED),
    (CLOSED, success, CLOSED),
    (CLOSED, failure, CLOSED),
    (CLOSED, release, CLOSED),
    (CLOSED, failures_with_a_success_between, CLOSED),
    (CLOSED, failures_up_to_the_threshold, OPEN),
    (CLOSED, late_successes, CLOSED),
    (CLOSED, late_failures, CLOSED),
    (CLOSED, reset, CLOSED),
    (OPEN, request, OPEN),
    (OPEN, request_just_before_the_cooldown_ends, OPEN),
    (OPEN, request_after_the_cooldown, HALF_OPEN),
    (OPEN, request_after_the_clock_was_set_back, HALF_OPEN),
    (OPEN, late_successes, OPEN),
    (OPEN, late_failures, OPEN),
    (OPEN, reset, CLOSED),
    (HALF_OPEN, request, HALF_OPEN),
    (HALF_OPEN, success, CLOSED),
    (HALF_OPEN, failure, OPEN),
    (HALF_OPEN, release, HALF_OPEN),
    (HALF_OPEN, late_successes, HALF_OPEN),
    (HALF_OPEN, late_failures, HALF_OPEN),
    (HALF_OPEN, failure_of_a_probe_whose_lease_has_expired, OPEN),
    (HALF_OPEN, reset, CLOSED),
]


@pytest.mark.parametrize(("before", "cause", "after"), TRANSITIONS)
def test_the_table_of_transitions(
    store: CircuitStore, clock: MovedClock, before: CircuitState, cause: Cause, after: CircuitState
) -> None:
    """Each event causes exactly the transition in the table, and the answer reports the new state."""
    harness = StoreHarness(store, clock)
    harness.bring_to(before)
    assert store.read()[NAME].state is before
    answer = cause(harness)
    assert store.read()[NAME].state is after
    assert answer is not None
    assert answer.after is after


def test_probes_are_limited_and_a_released_one_frees_its_slot(store: CircuitStore, clock: MovedClock) -> None:
    """The number of probes is limited. A cancelled probe frees its slot."""
    harness = StoreHarness(store, clock)
    harness.bring_to(HALF_OPEN)
    assert harness.ask().admission is not None
    full = harness.ask()
    assert full.admission is None
    assert full.until is not None
    assert full.now < full.until <= full.now + LEASE_MS
    harness.end(CallOutcome.RELEASED)
    assert harness.ask().admission is not None


def test_a_repeated_probe_request_keeps_its_slot(store: CircuitStore, clock: MovedClock) -> None:
    """If a client repeats a probe's request with the same call id, the probe keeps its slot and gets no second slot."""
    harness = StoreHarness(store, clock)
    harness.bring_to(HALF_OPEN)
    first = harness.admitted[0]
    for _ in range(2):
        assert store.admit(NAME, first.id, LEASE_MS).admission == first
    assert len(store.read()[NAME].probes) == 1
    assert harness.ask().admission is not None
    assert harness.ask().admission is None
    assert store.admit(NAME, first.id, LEASE_MS).admission == first


def test_a_dead_probe_frees_its_slot_when_its_lease_is_over(store: CircuitStore, clock: MovedClock) -> None:
    """If a process dies, its probe's slot becomes free when the probe's lease expires."""
    harness = StoreHarness(store, clock)
    harness.bring_to(HALF_OPEN)
    harness.ask()
    harness.pass_time(LEASE_MS / 1_000 - 1)
    assert harness.ask().admission is None
    harness.pass_time(1)
    assert harness.ask().admission is not None


def test_an_open_circuit_says_when_its_cooldown_ends(store: CircuitStore, clock: MovedClock) -> None:
    """A refusal says when the cooldown ends, because turns that wait for the breaker are resumed at that time."""
    harness = StoreHarness(store, clock)
    harness.bring_to(OPEN)
    harness.pass_time(10)
    refusal = harness.ask()
    assert refusal.admission is None
    assert refusal.until is not None
    assert refusal.until - refusal.now == pytest.approx(50_000, abs=5_000)


def test_the_counts_are_those_of_the_contract(store: CircuitStore, clock: MovedClock) -> None:
    """Consecutive failures and all successes are counted. A success of an earlier epoch does not reset the failures."""
    harness = StoreHarness(store, clock)
    succeeded, failed, released = CallOutcome.SUCCEEDED, CallOutcome.FAILED, CallOutcome.RELEASED
    for outcome in (succeeded, failed, succeeded, released, failed):
        harness.ask()
        harness.end(outcome)
    found = store.read()[NAME]
    assert (found.failures, found.successes, found.opened_at_ms) == (1, 2, None)
    assert found.last_failure_ms is not None
    store.settle(NAME, Admission("late", epoch=1), CallOutcome.SUCCEEDED)
    later = store.read()[NAME]
    assert (later.failures, later.successes) == (1, 3)


def test_a_reset_of_an_unknown_circuit_returns_none(store: CircuitStore) -> None:
    """A reset of an unknown name returns `None`, so that a misspelt name does not look like a success."""
    assert store.reset("llm:nobody") is None
    assert store.read() == {}


POLICIES = st.builds(
    Policy,
    failure_threshold=st.integers(1, 2),
    cooldown_ms=st.sampled_from([1, 1_000, 60_000]),
    half_open_max_probes=st.integers(1, 3),
)
# "ask": a call requests admission; the number is its lease. "asks again": the last admitted call repeats its request.
# An outcome or "dies": an admitted call ends, or its process dies; the number selects the call. "time": milliseconds
# pass. "reset": an operator resets the circuit.
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([1, 1_000, 100_000])),
    st.tuples(st.just("asks again"), st.sampled_from([1, 1_000])),
    st.tuples(st.just("failed"), st.integers(0, 5)),
    st.tuples(st.sampled_from([*CallOutcome, "dies"]), st.integers(0, 5)),
    st.tuples(st.just("time"), st.sampled_from([1, 1_000, 60_000, 200_000, -60_000])),
    st.tuples(st.sampled_from(["ask", "ask", "reset"]), st.just(1_000)),
)
SCHEDULES = st.lists(EVENTS, min_size=10, max_size=60)


def named(event: str, number: int, admitted: list[Admission]) -> str:
    """The id of the call that requests admission: the last admitted call's id for "asks again", otherwise a new id."""
    return admitted[-1].id if event == "asks again" and admitted else str(number)


@given(POLICIES, SCHEDULES)
def test_invariants_hold_after_any_schedule(policy: Policy, schedule: list[tuple[str, int]]) -> None:
    """Probes stay within their limit, epoch numbers never decrease, and an open circuit admits a call in the end."""
    now = 1_000_000_000
    circuit = Circuit(epoch=now)
    admitted: list[Admission] = []
    for number, (event, value) in enumerate(schedule):
        before = circuit
        match event:
            case "ask" | "asks again":
                call_id = named(event, number, admitted)
                circuit, admission = machine.admit(circuit, policy, now, call_id, value)
                admitted += [admission] if admission else []
            case "time":
                now += value
            case "reset":
                circuit = machine.reset(circuit, now)
            case "dies" if admitted:
                del admitted[value % len(admitted)]
            case _:
                if not admitted:
                    continue
                ended = admitted.pop(value % len(admitted))
                circuit = machine.settle(circuit, policy, now, ended, CallOutcome(event))
        assert len(circuit.probes) <= policy.half_open_max_probes
        assert (circuit.state is HALF_OPEN) or not circuit.probes
        assert (circuit.opened_at_ms is None) == (circuit.state is CLOSED)
        assert circuit.epoch > before.epoch if circuit.state is not before.state else circuit.epoch >= before.epoch
        assert circuit.state is not CLOSED or circuit.failures < policy.failure_threshold
    waited = max([now, *circuit.probes.values(), (circuit.opened_at_ms or now) + policy.cooldown_ms])
    _, at_last = machine.admit(circuit, policy, waited, "at last", 1)
    assert at_last is not None


@pytest.fixture
def moved_fleet(redis_url: str) -> Iterator[tuple[FleetCircuits, list[int]]]:
    """The circuits in Redis, and a list with one number: the milliseconds to add to Redis's time."""
    ahead = [0]
    fleet = FleetCircuits(redis_url, POLICY, lambda: ahead[0], timeout_s=30)
    yield fleet, ahead
    fleet.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(POLICIES, SCHEDULES)
def test_the_scripts_and_the_machine_agree(
    moved_fleet: tuple[FleetCircuits, list[int]], policy: Policy, schedule: list[tuple[str, int]]
) -> None:
    """The Lua scripts and the Python state machine produce the same circuit after each event."""
    fleet, ahead = moved_fleet
    fleet._policy = policy
    fleet._client.flushdb()
    circuit: Circuit | None = None
    admitted: list[Admission] = []
    for number, (event, value) in enumerate(schedule):
        match event:
            case "ask" | "asks again":
                call_id = named(event, number, admitted)
                answer = fleet.admit(NAME, call_id, value)
                circuit, admission = machine.admit(circuit or Circuit(answer.now), policy, answer.now, call_id, value)
                assert answer.admission == admission
                assert answer.until == machine.lets_through_at(circuit, policy)
                admitted += [admission] if admission else []
            case "time":
                ahead[0] += value
            case "reset":
                found = fleet.reset(NAME)
                assert (found is None) == (circuit is None)
                circuit = machine.reset(circuit, found.now) if circuit and found else None
            case "dies" if admitted:
                del admitted[value % len(admitted)]
            case _:
                if not admitted or circuit is None:
                    continue
                ended, outcome = admitted.pop(value % len(admitted)), CallOutcome(event)
                answer = fleet.settle(NAME, ended, outcome)
                assert answer.before is circuit.state
                circuit = machine.settle(circuit, policy, answer.now, ended, outcome)
                assert (answer.after, answer.failures) == (circuit.state, circuit.failures)
        assert fleet.read().get(NAME) == circuit
