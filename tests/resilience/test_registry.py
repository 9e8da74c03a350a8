"""Breakers as callers and operators use them, with Redis and without it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from perdure.clock import MovedClock
from perdure.errors import (
    Abandoned,
    CircuitBreakerOpen,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    ProviderError,
    RateLimited,
    Unavailable,
)
from perdure.resilience import stores
from perdure.resilience.circuit import CallOutcome, CircuitState, Policy
from perdure.resilience.redis_circuits import FleetCircuits, Successes
from perdure.resilience.registry import Breaker, Breakers
from perdure.resilience.shared import EXCHANGE_S, PAUSE_S, SharedCircuits, Transition
from perdure.resilience.stores import CircuitAnswer, OwnCircuits
from perdure.servers import redis
from perdure.servers.lifecycle import Running
from perdure.servers.redis import client_url
from perdure.settings import REDIS_PREFIX, BreakerSettings

SETTINGS = BreakerSettings(failure_threshold=2, cooldown_s=60)
DOWN = ProviderError("down", transient=True)


@pytest.fixture
def transitions() -> list[Transition]:
    """The transitions that the listener received."""
    return []


@pytest.fixture
def breakers(redis_url: str, clock: MovedClock, transitions: list[Transition]) -> Iterator[Breakers]:
    """The breakers of one process, with the test suite's Redis."""
    made = Breakers(SETTINGS, clock, redis_url, transitions.append)
    yield made
    made.close()


def fail(breaker: Breaker, error: BaseException = DOWN) -> None:
    """Execute a call that fails with `error`."""

    def work() -> None:
        raise error

    with pytest.raises(type(error)):
        breaker.execute(work, 10)


def succeed(breaker: Breaker) -> str:
    """Execute a call that succeeds."""
    return breaker.execute(lambda: "fine", 10)


def refused(breaker: Breaker) -> CircuitBreakerOpen:
    """Execute a call that the breaker refuses. Returns the refusal."""
    with pytest.raises(CircuitBreakerOpen) as caught:
        succeed(breaker)
    return caught.value


def test_a_breaker_opens_for_every_process_with_the_documented_error(
    breakers: Breakers, redis_url: str, clock: MovedClock
) -> None:
    """A breaker that one process opened refuses the calls of every process with the documented error."""
    for _ in range(2):
        fail(breakers.get("llm:test"))
    other = Breakers(SETTINGS, clock, redis_url)
    error = refused(other.get("llm:test"))
    assert error.code == "CIRCUIT_BREAKER_OPEN"
    assert error.http_status == 503
    assert error.message == "Service temporarily unavailable due to repeated failures. Please try again later."
    assert error.until is not None
    assert error.retry_after_s == pytest.approx(60, abs=30)
    assert (error.until - clock.now()).total_seconds() == pytest.approx(60, abs=30)
    assert succeed(other.get("llm:another")) == "fine"
    other.close()


def test_a_transition_is_reported_once_by_the_process_that_made_it(
    breakers: Breakers,
    redis_url: str,
    clock: MovedClock,
    transitions: list[Transition],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process that causes a transition reports it once, to its listener and in its log. Other processes do not."""
    others_transitions: list[Transition] = []
    other = Breakers(SETTINGS, clock, redis_url, others_transitions.append)
    with caplog.at_level(logging.INFO, "perdure.resilience"):
        fail(breakers.get("llm:test"))
        fail(other.get("llm:test"))
        refused(breakers.get("llm:test"))
        breakers.reset("llm:test")
    assert others_transitions == [Transition("llm:test", CircuitState.CLOSED, CircuitState.OPEN, 2, fleet=True)]
    assert transitions == [Transition("llm:test", CircuitState.OPEN, CircuitState.CLOSED, 0, fleet=True)]
    assert [record.getMessage() for record in caplog.records] == [
        "breaker llm:test of the fleet: from closed to open, consecutive failures: 2",
        "breaker llm:test of the fleet: from open to closed, consecutive failures: 0",
    ]
    other.close()


@pytest.mark.parametrize("lost", ["admit", "settle"])
def test_a_lost_answer_does_not_keep_a_probes_slot(
    redis_url: str, clock: MovedClock, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """If Redis fails when a probe begins or ends, a later call frees the probe's slot before the lease expires."""
    policy = Policy.of(SETTINGS)
    fleet = FleetCircuits(redis_url, policy, lambda: round(clock.offset.total_seconds() * 1_000))
    circuits = SharedCircuits(OwnCircuits(policy, clock), fleet, clock, None)
    for call in ("1", "2"):
        admission = circuits.admit("llm:test", call, 600_000).answer.admission
        assert admission is not None
        circuits.settle("llm:test", admission, CallOutcome.FAILED, fleet=True)
    clock.advance(timedelta(seconds=61))
    ask = getattr(fleet, lost)

    def slow(*given: Any) -> CircuitAnswer:
        if lost == "admit":
            ask(*given)
        raise Unavailable("Too slow.")

    with monkeypatch.context() as patch:
        if lost == "settle":
            probe = circuits.admit("llm:test", "3", 600_000).answer.admission
            assert probe is not None
            patch.setattr(fleet, lost, slow)
            circuits.settle("llm:test", probe, CallOutcome.SUCCEEDED, fleet=True)
        else:
            patch.setattr(fleet, lost, slow)
            assert not circuits.admit("llm:test", "3", 600_000).fleet
    assert len(fleet.read()["llm:test"].probes) == 1
    clock.advance(timedelta(seconds=PAUSE_S + 1))
    assert circuits.admit("llm:test", "4", 600_000).fleet
    assert circuits.admit("llm:test", "5", 600_000).answer.admission is not None
    circuits.close()


def test_an_admission_holds_although_freeing_another_slot_fails(
    redis_url: str, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Redis admits a call but then fails to free another call's slot, the admitted call proceeds."""
    policy = Policy.of(SETTINGS)
    fleet = FleetCircuits(redis_url, policy, lambda: round(clock.offset.total_seconds() * 1_000))
    circuits = SharedCircuits(OwnCircuits(policy, clock), fleet, clock, None)

    def unavailable(*_: Any) -> CircuitAnswer:
        raise Unavailable("Unavailable.")

    with monkeypatch.context() as patch:
        patch.setattr(fleet, "admit", unavailable)
        assert not circuits.admit("llm:test", "1", 600_000).fleet
    clock.advance(timedelta(seconds=PAUSE_S + 1))
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "free", unavailable)
        admitted = circuits.admit("llm:test", "2", 600_000)
        assert admitted.fleet
        assert admitted.answer.admission is not None
        assert not circuits.admit("llm:test", "3", 600_000).fleet
    circuits.close()


def test_a_listener_that_fails_stops_no_call(redis_url: str, clock: MovedClock) -> None:
    """A listener that raises does not stop a call."""

    def broken(change: Transition) -> None:
        raise RuntimeError("a bug in the listener")

    breakers = Breakers(SETTINGS, clock, redis_url, broken)
    for _ in range(2):
        fail(breakers.get("llm:test"))
    refused(breakers.get("llm:test"))
    breakers.close()


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        pytest.param(RateLimited("slow down"), True, id="429"),
        pytest.param(DeadlineExceeded("late"), True, id="timeout"),
        pytest.param(ProviderError("gone", transient=True), True, id="5xx or connection"),
        pytest.param(ProviderError("no word why"), True, id="unknown"),
        pytest.param(RuntimeError("a bug in it"), True, id="foreign"),
        pytest.param(ProviderError("no", transient=False), False, id="refused"),
        pytest.param(InvalidRequest("wrong"), False, id="invalid"),
        pytest.param(Abandoned("never mind"), False, id="cancelled"),
        pytest.param(KeyboardInterrupt(), False, id="interrupted"),
    ],
)
def test_what_counts_as_a_failure(breakers: Breakers, error: BaseException, *, counts: bool) -> None:
    """Every error counts as a failure, except the errors of refused requests and cancelled calls."""
    fail(breakers.get("llm:test"), error)
    (found,) = breakers.list()
    assert found.failure_count == counts
    assert found.success_count == 0


def test_the_list_has_the_contracts_shape(breakers: Breakers) -> None:
    """The list has the shape that `GET /v1/breakers` returns."""
    succeed(breakers.get("mcp:weather"))
    for _ in range(2):
        fail(breakers.get("llm:test"))
    opened, closed = (metrics.to_dict() for metrics in breakers.list())
    assert closed == {
        "name": "mcp:weather",
        "state": "closed",
        "failure_count": 0,
        "success_count": 1,
        "last_failure_time": None,
        "opened_at": None,
    }
    assert opened["state"] == "open"
    assert opened["failure_count"] == 2
    assert opened["last_failure_time"] == opened["opened_at"] == pytest.approx(time.time() * 1_000, abs=60_000)


def test_a_reset_lets_calls_through_again(breakers: Breakers) -> None:
    """After a reset by an operator, calls are admitted again."""
    for _ in range(2):
        fail(breakers.get("llm:test"))
    assert breakers.reset("llm:test").state is CircuitState.CLOSED
    assert succeed(breakers.get("llm:test")) == "fine"
    with pytest.raises(NotFound, match="llm:nobody"):
        breakers.reset("llm:nobody")


@pytest.mark.parametrize("then", ["refused", "reset", "failed"])
def test_a_breaker_is_listed_after_redis_has_lost_its_name(breakers: Breakers, redis_url: str, then: str) -> None:
    """Redis may evict the set of names, and keep the circuits. Each use and each reset of one puts its name back."""
    fail(breakers.get("llm:test"))
    if then != "failed":
        fail(breakers.get("llm:test"))
    client = redis_py.Redis.from_url(client_url(redis_url), decode_responses=True)
    assert client.delete(f"{REDIS_PREFIX}{{breakers}}") == 1
    client.close()
    if then == "reset":
        assert breakers.reset("llm:test").state is CircuitState.CLOSED
    elif then == "failed":
        fail(breakers.get("llm:test"))
    else:
        with pytest.raises(CircuitBreakerOpen):
            succeed(breakers.get("llm:test"))
    state = CircuitState.CLOSED if then == "reset" else CircuitState.OPEN
    assert [(each.name, each.state) for each in breakers.list()] == [("llm:test", state)]


def test_names_of_expired_circuits_leave_the_list_of_names(breakers: Breakers, redis_url: str) -> None:
    """Users name the hosts of callbacks: what is kept for a host ends with its circuit, and reading does not grow."""
    names, expired = f"{REDIS_PREFIX}{{breakers}}", 1_000
    client = redis_py.Redis.from_url(client_url(redis_url), decode_responses=True)
    client.sadd(names, *(f"webhook:{number}.example" for number in range(expired)))
    for number in range(150):
        fail(breakers.get(f"webhook:new-{number}.example"))
    assert client.scard(names) < 300
    assert _commands(redis_url, breakers.list) < 1_000
    assert {each.name for each in breakers.list()} == {f"webhook:new-{number}.example" for number in range(150)}
    client.close()


def test_all_of_many_breakers_are_listed(breakers: Breakers, redis_url: str) -> None:
    """They are read in pages, with the probes of those that are half open."""
    key = f"{REDIS_PREFIX}{{breakers}}"
    found: Any = {"state": "closed", "epoch": 1, "failures": 0, "successes": 7, "last_failure": "", "opened_at": ""}
    client = redis_py.Redis.from_url(client_url(redis_url))
    pipeline = client.pipeline(transaction=False)
    for number in range(3_000):
        pipeline.sadd(key, f"webhook:{number}.example")
        pipeline.hset(f"{key}:webhook:{number}.example", mapping=found)
    pipeline.execute()
    client.hset(f"{key}:webhook:1.example", mapping={"state": "half_open"})
    client.zadd(f"{key}:webhook:1.example:probes", {"a": 5, "b": 9})
    client.close()
    listed = {each.name: (each.state, each.success_count) for each in breakers.list()}
    assert listed.pop("webhook:1.example") == (CircuitState.HALF_OPEN, 7)
    assert listed == {f"webhook:{number}.example": (CircuitState.CLOSED, 7) for number in range(3_000) if number != 1}
    fleet = FleetCircuits(redis_url, Policy.of(SETTINGS))
    assert fleet.read()["webhook:1.example"].probes == {"a": 5, "b": 9}
    fleet.close()


def test_a_switched_off_breaker_refuses_nothing(redis_url: str, clock: MovedClock) -> None:
    """With `PERDURE_BREAKER__ENABLED=false` no call is refused."""
    breakers = Breakers(BreakerSettings(enabled=False, failure_threshold=1), clock, redis_url)
    for _ in range(3):
        fail(breakers.get("llm:test"))
    assert succeed(breakers.get("llm:test")) == "fine"
    assert breakers.list() == []
    breakers.close()


def _commands(redis_url: str, work: Callable[[], object]) -> int:
    """The commands that Redis runs meanwhile, also those of scripts."""
    client = redis_py.Redis.from_url(client_url(redis_url))
    before = client.info("stats")["total_commands_processed"]
    work()
    commands = client.info("stats")["total_commands_processed"] - before - 1
    client.close()
    return int(commands)


def test_a_breaker_costs_nothing_while_no_call_fails(breakers: Breakers, redis_url: str) -> None:
    """The successes of many calls are reported together, and each is counted."""
    breaker = breakers.get("llm:test")
    succeed(breaker)
    assert _commands(redis_url, lambda: [succeed(breaker) for _ in range(200)]) < 30
    assert breakers.list()[0].success_count == 201


def _fail_often(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        fail(breaker)


def test_a_failing_breaker_costs_two_short_scripts_a_call(clock: MovedClock, redis_url: str) -> None:
    settings = SETTINGS.model_copy(update={"failure_threshold": 1_000})
    breakers = Breakers(settings, clock, redis_url)
    breaker = breakers.get("llm:test")
    fail(breaker)
    commands = _commands(redis_url, lambda: _fail_often(breaker, 50))
    breakers.close()
    within_scripts = 50 * (2 + 6)  # TIME and HMGET in both scripts; ZREM, HSET, EXPIRE and SADD in the second
    assert commands - within_scripts == 50 * 2


def _leased(fleet: FleetCircuits, lease_ms: int) -> None:
    """Another process has a call that succeeds, and leases the circuit."""
    admission = fleet.admit("llm:test", "another", 1_000).admission
    assert admission is not None
    assert fleet.settle("llm:test", admission, CallOutcome.SUCCEEDED, None, lease_ms).leased == admission.epoch


@pytest.mark.parametrize("lease_ms", [900, 60_000])
def test_a_circuit_that_another_process_leases_opens_when_the_lease_ends(
    clock: MovedClock, redis_url: str, lease_ms: int
) -> None:
    """The other process may have successes that it has not reported. A lease of an earlier clock does not count."""
    other, breakers = FleetCircuits(redis_url, Policy.of(SETTINGS)), Breakers(SETTINGS, clock, redis_url)
    failing = breakers.get("llm:test")
    _leased(other, lease_ms)
    for _ in range(SETTINGS.failure_threshold):
        fail(failing)
    if lease_ms < 1_000:
        assert breakers.list()[0].state == "closed"
        time.sleep(lease_ms / 1_000)
    refused(failing)
    breakers.close()
    other.close()


def test_a_circuit_that_no_call_opened_is_probed_after_the_cooldown(clock: MovedClock, redis_url: str) -> None:
    """The failures reached the threshold while the circuit was leased, and the next call came much later."""
    ahead = 0
    policy = Policy.of(SETTINGS)
    fleet = FleetCircuits(redis_url, policy, lambda: ahead)
    _leased(fleet, 900)
    failing = FleetCircuits(redis_url, policy, lambda: ahead)
    for number in range(policy.failure_threshold):
        admission = failing.admit("llm:test", str(number), 1_000).admission
        assert admission is not None
        failing.settle("llm:test", admission, CallOutcome.FAILED)
    ahead = policy.cooldown_ms + 1_000
    probe = failing.admit("llm:test", "a probe", 1_000)
    assert (probe.after, probe.admission is not None) == (CircuitState.HALF_OPEN, True)
    fleet.close()
    failing.close()


def test_a_threshold_of_one_opens_in_spite_of_leases(clock: MovedClock, redis_url: str) -> None:
    settings = SETTINGS.model_copy(update={"failure_threshold": 1})
    other, breakers = FleetCircuits(redis_url, Policy.of(settings)), Breakers(settings, clock, redis_url)
    _leased(other, 900)
    fail(breakers.get("llm:test"))
    refused(breakers.get("llm:test"))
    breakers.close()
    other.close()


def test_late_successes_shorten_a_row_once(clock: MovedClock, redis_url: str) -> None:
    """A success before the last failure leaves this one. An older success, reported later, leaves the others."""
    policy = Policy(10, 60_000, 1)
    fleet = FleetCircuits(redis_url, policy, lambda: round(clock.offset.total_seconds() * 1_000))
    admission = fleet.admit("llm:test", "one", 1_000).admission
    assert admission is not None

    def failed(after_ms: int) -> int:
        clock.advance(timedelta(milliseconds=after_ms))
        return fleet.settle("llm:test", admission, CallOutcome.FAILED).failures

    def succeeded(age_ms: int) -> int:
        return fleet.settle("llm:test", admission, CallOutcome.SUCCEEDED, Successes(1, age_ms)).failures

    assert [failed(each) for each in (0, 1_000, 1_000)] == [1, 2, 3]
    assert [succeeded(each) for each in (500, 600)] == [1, 1]
    assert [failed(100), failed(100), succeeded(900)] == [2, 3, 3]
    fleet.close()


def test_a_call_does_not_fail_because_no_thread_can_be_started(
    breakers: Breakers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        assert succeed(breakers.get("llm:test")) == "fine"
    assert breakers.list()[0].success_count == 2


def test_successes_of_another_process_end_a_row_of_failures(clock: MovedClock, redis_url: str) -> None:
    breakers = [Breakers(SETTINGS, clock, redis_url) for _ in range(2)]
    healthy, failing = (each.get("llm:test") for each in breakers)
    succeed(healthy)
    succeed(failing)
    until = time.monotonic() + 4 * EXCHANGE_S
    while time.monotonic() < until:
        fail(failing)
        succeed(healthy)
    assert breakers[1].list()[0].state == "closed"
    for each in breakers:
        each.close()


# --- Redis is unavailable


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """A Redis that the test can stop."""
    with redis.start(tmp_path / "redis") as running:
        yield running


def test_calls_continue_while_redis_is_stopped(
    tmp_path: Path, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """While Redis is stopped, each process uses its own breakers. Afterwards the fleet's state applies again."""
    with redis.start(tmp_path / "redis") as server:
        breakers = Breakers(SETTINGS, clock, server.url)
        llm, mcp = breakers.get("llm:test"), breakers.get("mcp:test")
        for _ in range(2):
            fail(llm)
        succeed(mcp)
    with caplog.at_level(logging.INFO, "perdure.resilience"):
        caplog.clear()
        refused(llm)  # the fleet's breaker was open when Redis stopped
        for _ in range(2):
            fail(mcp)
        refused(mcp)
        with pytest.raises(Unavailable):
            breakers.list()
        with redis.start(tmp_path / "redis"):
            refused(mcp)  # Redis is not used again before the pause has passed
            clock.advance(timedelta(seconds=PAUSE_S))
            assert succeed(mcp) == "fine"
            assert {each.name: each.state for each in breakers.list()} == {"llm:test": "open", "mcp:test": "closed"}
    unavailable, opened, back = (record.getMessage() for record in caplog.records)
    assert "this process uses its own breakers" in unavailable
    assert opened == "breaker mcp:test of this process: from closed to open, consecutive failures: 2"
    assert back == "Redis answers: using the fleet's breakers again"
    breakers.close()


def test_an_unresponsive_redis_delays_one_call_per_pause(
    server: Running, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Redis does not respond, one call waits for it. During the following pause, no call uses Redis."""
    breakers = Breakers(SETTINGS, clock, server.url)
    breaker = breakers.get("llm:test")
    succeed(breaker)
    clock.advance(timedelta(seconds=EXCHANGE_S))  # the lease ends
    requests: list[str] = []
    admit = FleetCircuits.admit

    def counted(self: FleetCircuits, name: str, call_id: str, lease_ms: int) -> CircuitAnswer:
        requests.append(name)
        return admit(self, name, call_id, lease_ms)

    monkeypatch.setattr(FleetCircuits, "admit", counted)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(10):
            succeed(breaker)
        assert time.monotonic() - began < 5  # redis-py itself would wait without limit
        assert len(requests) == 1
        clock.advance(timedelta(seconds=PAUSE_S))
        with ThreadPoolExecutor(8) as pool:
            together = threading.Barrier(8)

            def one() -> str:
                together.wait(30)
                return succeed(breaker)

            assert {each.result() for each in [pool.submit(one) for _ in range(8)]} == {"fine"}
        assert len(requests) == 2
    finally:
        os.kill(server.pid, signal.SIGCONT)
    clock.advance(timedelta(seconds=PAUSE_S))
    succeed(breaker)
    assert len(requests) == 3
    assert breakers.list()[0].success_count >= 2
    breakers.close()


def test_without_a_redis_a_process_has_breakers_of_its_own(clock: MovedClock) -> None:
    """Without a Redis URL, a process uses its own breakers, so that programs can use breakers without a server."""
    breakers = Breakers(SETTINGS, clock)
    for _ in range(2):
        fail(breakers.get("llm:test"))
    assert refused(breakers.get("llm:test")).retry_after_s == pytest.approx(60, abs=5)
    clock.advance(timedelta(seconds=60))
    assert succeed(breakers.get("llm:test")) == "fine"
    assert [each.state for each in breakers.list()] == [CircuitState.CLOSED]


def test_a_process_keeps_a_bounded_number_of_breakers(clock: MovedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many hosts of callbacks, a process forgets those that it called least lately."""
    monkeypatch.setattr(stores, "MOST_OWN", 10)
    breakers = Breakers(SETTINGS, clock)
    for number in range(30):
        fail(breakers.get("llm:test"))
        clock.advance(timedelta(seconds=SETTINGS.cooldown_s))
        fail(breakers.get(f"webhook:{number}.example"))
    kept = {f"webhook:{number}.example" for number in range(21, 30)} | {"llm:test"}
    assert {each.name for each in breakers.list()} == kept


def test_the_fleets_open_circuits_take_a_bounded_place_in_a_process(
    clock: MovedClock, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process remembers which circuits of the fleet are open, for the time without Redis: the latest ones."""
    monkeypatch.setattr(stores, "MOST_OWN", 10)
    policy = Policy.of(SETTINGS)
    own, fleet = OwnCircuits(policy, clock), FleetCircuits(redis_url, policy)
    circuits = SharedCircuits(own, fleet, clock, None)
    for number, attempt in product(range(30), range(2)):
        admission = circuits.admit(f"webhook:{number}.example", str(attempt), 1_000).answer.admission
        assert admission is not None
        circuits.settle(f"webhook:{number}.example", admission, CallOutcome.FAILED, fleet=True)
    assert {*own.read()} == {f"webhook:{number}.example" for number in range(20, 30)}
    circuits.close()


def test_a_key_of_another_kind_stops_no_call(breakers: Breakers, redis_url: str) -> None:
    """If a circuit's key in Redis has the wrong type, calls use the process's own breakers."""
    client = redis_py.Redis.from_url(client_url(redis_url))
    client.set("perdure:{breakers}:llm:test", "nonsense")
    client.close()
    assert succeed(breakers.get("llm:test")) == "fine"
