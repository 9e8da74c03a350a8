"""While a tool's circuit breaker is open, the tool is not run. The turn continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from perdure import ToolContext, tool
from perdure.errors import CircuitBreakerOpen, OutcomeUnknown, ToolError
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings
from perdure.tools.registry import Effect
from perdure.turns.run.loop import Runner
from tests.turns.harness import PATIENCE_S, Harness
from tests.turns.scripted import calls, says

COOLDOWN_S = 60
REFUSED = "Error: Not called: bank failed too often recently. Try again in 60 s."


class Bank:
    """The tools of a bank; the test sets the behaviour of `pay`."""

    def __init__(self, harness: Harness, breakers: Breakers) -> None:
        self.answer: Callable[[ToolContext], str] = lambda _: "paid"
        self.runs = 0
        self._harness = harness
        self.breakers = breakers

        @tool(effect="pure", timeout_s=PATIENCE_S, breaker="bank")
        def pay(context: ToolContext) -> str:
            """Pay."""
            self.runs += 1
            return self.answer(context)

        @tool(effect="pure", breaker="bank")
        def balance() -> str:
            """Return the balance."""
            return "12"

        harness.equip(pay, balance, replace(pay, name="hurried", effect=Effect.UNSAFE, timeout_s=0.05))

    def results(self, *names: str) -> list[str]:
        """Run a turn that calls each of the tools `names`; returns the results."""
        self._harness.script(calls(*[(name, {}) for name in names]), says("so be it"))
        sent = self._harness.send()
        Runner(replace(self._harness.runtime, breakers=self.breakers), "harness").run(sent.session_id)
        assert self._harness.turn(sent.turn_id)["status"] == "done"
        results = [each for each in self._harness.messages(sent.session_id) if each["role"] == "tool"]
        return [each["content"] for each in results[-len(names) :]]

    def fails(self, error: Exception, cause: Exception | None = None) -> None:
        """Make every later call of `pay` raise `error`."""

        def answer(_: ToolContext) -> str:
            raise error from cause

        self.answer = answer

    def state(self) -> str:
        """The state of the bank's breaker."""
        return {each.name: str(each.state) for each in self.breakers.list()}["tool:bank"]


@pytest.fixture
def bank(harness: Harness) -> Iterator[Bank]:
    """A bank whose breaker opens at the second consecutive failure."""
    breakers = Breakers(BreakerSettings(failure_threshold=2, cooldown_s=COOLDOWN_S), harness.clock)
    yield Bank(harness, breakers)
    breakers.close()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        pytest.param(ConnectionError("refused"), None, id="no connection"),
        pytest.param(RuntimeError("a bug in its client"), None, id="any other error"),
        pytest.param(ToolError("The bank is unavailable."), TimeoutError(), id="a ToolError with such a cause"),
        pytest.param(OutcomeUnknown("The bank did not respond."), None, id="unknown outcome"),
    ],
)
def test_failures_open_the_breaker_and_one_call_closes_it(
    harness: Harness, bank: Bank, error: Exception, cause: Exception | None
) -> None:
    """An open breaker refuses the calls of all its tools. After the cooldown, a successful call closes the breaker."""
    bank.fails(error, cause)
    bank.results("pay")
    bank.results("pay")
    runs = bank.runs
    assert bank.state() == "open"
    assert bank.results("pay", "balance") == [REFUSED, REFUSED]
    assert bank.runs == runs
    harness.move(COOLDOWN_S)
    bank.answer = lambda _: "paid"
    assert bank.results("pay") == ["paid"]
    assert bank.state() == "closed"


@pytest.mark.parametrize("cause", [None, ToolError("Nor half of that.")])
def test_a_tools_own_refusal_is_no_failure_of_the_service(bank: Bank, cause: Exception | None) -> None:
    """A `ToolError` without a cause, or caused by a `ToolError`, does not count as a failure of the service."""
    bank.fails(ToolError("At most 100 may be paid at once."), cause)
    for _ in range(3):
        assert bank.results("pay") == ["Error: At most 100 may be paid at once."]
    assert bank.state() == "closed"


def test_overdue_calls_open_the_breaker(bank: Bank) -> None:
    """A call that has timed out counts as a failure, although its thread still runs."""
    release = threading.Event()

    def hang(_: ToolContext) -> str:
        release.wait(PATIENCE_S)
        return "late"

    bank.answer = hang
    for _ in range(2):
        [result] = bank.results("hurried")
        assert "outcome of this call is unknown" in result
    assert bank.state() == "open"
    assert bank.results("balance") == [REFUSED]
    release.set()


def test_an_overdue_call_counts_once(bank: Bank) -> None:
    """A call that has timed out counts as one failure, even if it returns later."""
    release, ended = threading.Event(), threading.Semaphore(0)

    def late(_: ToolContext) -> str:
        release.wait(PATIENCE_S)
        ended.release()
        return "late"

    bank.answer = late
    bank.results("hurried")
    release.set()
    assert ended.acquire(timeout=PATIENCE_S)
    failures = [each.failure_count for each in bank.breakers.list() if each.name == "tool:bank"]
    assert failures == [1]
    release.clear()
    bank.results("hurried")
    assert bank.state() == "open"
    release.set()


def test_while_one_call_probes_others_are_refused(harness: Harness, bank: Bank) -> None:
    """While the breaker is half open, one call runs and others are refused, to protect a recovering service."""
    bank.fails(ConnectionError("refused"))
    bank.results("pay", "pay")
    harness.move(COOLDOWN_S)

    def probed(_: ToolContext) -> str:
        assert bank.state() == "half_open"
        with pytest.raises(CircuitBreakerOpen):
            bank.breakers.get("tool:bank").execute(lambda: "never", 1)
        return "paid"

    bank.answer = probed
    assert bank.results("pay") == ["paid"]
    assert bank.state() == "closed"
