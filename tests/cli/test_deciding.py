"""`perdure turns approve|deny` and `perdure breakers`: an operator's decisions at a terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perdure import Agent, celery_tool, external_tool, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.errors import CircuitBreakerOpen, ProviderError
from perdure.resilience.registry import Breakers
from perdure.runtime import Runtime
from perdure.settings import BreakerSettings
from perdure.turns.calls import queries
from perdure.turns.inbox import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.lease.claim import NotNeeded, Ran
from perdure.turns.reading import read_turn
from perdure.turns.run.loop import Runner
from tests.cli.conftest import Environment, Perdure
from tests.turns.broker import Broker
from tests.turns.scripted import Scripted, calls, says

AGENTS = '''
from perdure import Agent, tool

@tool(requires_approval=True)
def pay(amount: int, to: str = "") -> str:
    """Pay this much."""
    raise AssertionError("the command does not run it")

assistant = Agent("assistant", "You pay.", [pay])
'''


@tool(requires_approval=True)
def pay(amount: int, to: str = "") -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.mark.long
def test_calls_are_shown_and_decided(
    perdure: Perdure, environment: Environment, runtime: Runtime, tmp_path: Path
) -> None:
    """An operator approves one call with changed arguments and denies another. Invalid arguments are refused."""
    model = Scripted(calls(("pay", {"amount": 5}), ("pay", {"amount": 6})), says("paid"))
    paying = replace(runtime, agents=Agents([Agent("assistant", "You pay.", [pay])]), models=lambda _name: model)
    sent = accept.accept(paying, Incoming(user=UserKey("ann"), text="pay"))
    runner = Runner(paying, "test")
    runner.run(sent.session_id)
    turn_id = str(sent.turn_id)
    (tmp_path / "paying.py").write_text(AGENTS)  # in the command's working directory
    env = {**environment, "PERDURE_AGENTS": "paying"}

    shown = perdure("turns", "show", turn_id)
    wrong = perdure("turns", "approve", turn_id, "call_0", "--arguments", '{"amount": "much"}', env=env)
    approved = perdure("turns", "approve", turn_id, "call_0", "--arguments", '{"amount": 4}', env=env)
    denied = perdure("turns", "deny", turn_id, "call_1", env=env)

    assert 'call_0: pay({"amount": 5}) until' in shown.stdout
    assert (wrong.returncode, approved.returncode, denied.returncode) == (2, 0, 0), approved.stderr + denied.stderr
    assert "amount" in wrong.stderr
    assert "1 calls of the turn still wait" in approved.stderr
    assert "The turn continues." in denied.stderr
    runner.run(sent.session_id)
    assert read_turn(runtime.database, sent.turn_id)["reply"]["text"] == "paid"
    results = [each.content for each in model.requests[-1].messages if each.role == "tool"]
    assert results[0].endswith("paid 4")
    assert "denied this call" in results[1]


def test_what_a_turn_waits_for_is_shown(perdure: Perdure, runtime: Runtime) -> None:
    """`turns show` prints the awaited call's tool, deadline and progress.

    The printed progress contains no control characters.
    """
    model, broker = Scripted(calls(("shop_export", {}))), Broker()
    waiting = replace(
        runtime,
        agents=Agents([Agent("assistant", "You export.", [celery_tool("shop.export")])]),
        models=lambda _name: model,
        calls=broker,
    )
    sent = accept.accept(waiting, Incoming(user=UserKey("ann"), text="export"))
    Runner(waiting, "test").run(sent.session_id)
    progress = {"effect_id": broker.sent[0].task_id, "progress": "half\x1b[31m done"}
    runtime.database.run(queries.NOTE_PROGRESS, progress)
    shown = perdure("turns", "show", str(sent.turn_id))
    assert "the task shop_export, until 20" in shown.stdout
    assert "half" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_an_operator_brings_a_result(perdure: Perdure, runtime: Runtime) -> None:
    """`turns show` prints the call that waits, and `turns answer` brings its result."""
    model = Scripted(calls(("scan", {}), ("scan", {})), says("scanned"))
    scanning = replace(
        runtime,
        agents=Agents([Agent("assistant", "You scan.", [external_tool("scan", "Scan a barcode.")])]),
        models=lambda _name: model,
    )
    sent = accept.accept(scanning, Incoming(user=UserKey("ann"), text="scan"))
    runner = Runner(scanning, "test")
    runner.run(sent.session_id)
    turn_id = str(sent.turn_id)
    shown = perdure("turns", "show", turn_id)
    neither = perdure("turns", "answer", turn_id, "call_0")
    brought = perdure("turns", "answer", turn_id, "call_0", '{"code": 7}')
    failed = perdure("turns", "answer", turn_id, "call_1", "--error", "No camera.")
    assert "the client scan, until 20" in shown.stdout
    assert "call_0: scan({}) until" in shown.stdout
    assert (neither.returncode, brought.returncode, failed.returncode) == (2, 0, 0), brought.stderr + failed.stderr
    assert "1 calls of the turn still wait" in brought.stderr
    assert "The turn continues." in failed.stderr
    runner.run(sent.session_id)
    assert read_turn(runtime.database, sent.turn_id)["reply"]["text"] == "scanned"


def test_breakers_are_listed_and_reset(perdure: Perdure, runtime: Runtime, redis_url: str) -> None:
    """`breakers list` shows an open breaker. `breakers reset` closes the breaker, and parked turns run again.

    An unknown breaker is an error.
    """
    limits = runtime.settings.turn.model_copy(update={"on_unavailable": "park"})
    model = Scripted(CircuitBreakerOpen(retry_after_s=600), says("back"))
    parking = replace(
        runtime, settings=runtime.settings.model_copy(update={"turn": limits}), models=lambda _name: model
    )
    sent = accept.accept(parking, Incoming(user=UserKey("ann"), text="hello"))
    runner = Runner(parking, "test")
    runner.run(sent.session_id)
    assert isinstance(runner.run(sent.session_id), NotNeeded)
    breakers = Breakers(BreakerSettings(failure_threshold=1), runtime.clock, redis_url)
    with pytest.raises(ProviderError):
        breakers.get("llm:openai:org/model").execute(_fail, 5)

    listed = perdure("breakers", "list", "--json")
    reset = perdure("breakers", "reset", "llm:openai:org/model")
    missing = perdure("breakers", "reset", "nobody")

    assert runner.run(sent.session_id) == Ran(1)
    assert read_turn(runtime.database, sent.turn_id)["reply"]["text"] == "back"
    [found] = json.loads(listed.stdout)["breakers"]
    assert (found["name"], found["state"]) == ("llm:openai:org/model", "open")
    assert (reset.returncode, missing.returncode) == (0, 1)
    assert "state\tclosed" in reset.stdout.splitlines()
    breakers.close()


def _fail() -> None:
    raise ProviderError("down", transient=True)


@pytest.mark.long
def test_an_operator_lists_and_decides_what_staff_approves(
    perdure: Perdure, environment: Environment, runtime: Runtime, tmp_path: Path
) -> None:
    """The operator sees every waiting call, and the turn shows who decided."""
    refund = tool(requires_approval=True, approver="staff", name="refund")(pay.function)
    model = Scripted(calls(("refund", {"amount": 5, "to": "\u202e54321"})), says("refunded"))
    paying = replace(runtime, agents=Agents([Agent("assistant", "You pay.", [refund])]), models=lambda _name: model)
    sent = accept.accept(paying, Incoming(user=UserKey("ann"), text="refund"))
    runner = Runner(paying, "test")
    runner.run(sent.session_id)
    runner.close()
    (tmp_path / "paying.py").write_text(AGENTS)
    env = {**environment, "PERDURE_AGENTS": "paying"}
    turn_id = str(sent.turn_id)

    shown = perdure("approvals", "list").stdout
    assert "refund\t" in shown
    assert r'"to": "\u202e54321"' in shown, "what a person approves is not shown backwards"
    [listed] = json.loads(perdure("approvals", "list", "--user", "ann", "--json").stdout)
    assert (listed["turn_id"], listed["call_id"], listed["approver"]) == (turn_id, "call_0", "staff")
    assert json.loads(perdure("approvals", "list", "--user", "bo", "--json").stdout) == []
    assert perdure("turns", "approve", turn_id, "call_0", env=env).returncode == 0
    assert "call_0: refund: approve by operator" in perdure("turns", "show", turn_id).stdout
    assert json.loads(perdure("approvals", "list", "--json").stdout) == []
