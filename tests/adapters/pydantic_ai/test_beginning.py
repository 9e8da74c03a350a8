"""Calls about which something around their tool decides, before the tool begins, and the time that a call then has."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import CallDeferred, DeferredToolRequests, FunctionToolset, RunContext, WrapperToolset
from pydantic_ai.capabilities import AbstractCapability, HandleDeferredToolCalls, Hooks

from perdure import effect
from perdure.database.engine import Moment
from perdure.testing import ask
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.outside import answer, parse_result
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use
from tests.turns.harness import Harness


class _Queue(WrapperToolset[Any]):
    """Hands its calls to someone outside."""

    async def call_tool(self, *_: Any, **__: Any) -> Any:
        raise CallDeferred(metadata={"job": 7})


def _queueing_hooks() -> AbstractCapability[Any]:
    hooks = Hooks[Any]()

    @hooks.on.before_tool_execute
    async def queue(ctx: RunContext[Any], *, call: Any, tool_def: Any, args: Any) -> Any:
        del ctx, call, tool_def, args
        raise CallDeferred(metadata={"job": 7})

    return hooks


@pytest.fixture(params=["wrapper", "hook"])
def deferring(request: pytest.FixtureRequest) -> PydanticAgent[Any, Any]:
    """An agent whose calls something around their tool defers."""
    tools = FunctionToolset[Any]()

    @tools.tool_plain
    def render(film: str) -> str:
        """Render a film."""
        raise AssertionError(film)

    if request.param == "wrapper":
        return PydanticAgent(name="assistant", toolsets=[_Queue(tools)])
    return PydanticAgent(name="assistant", toolsets=[tools], capabilities=[_queueing_hooks()])


@pytest.mark.parametrize("boundary", [None, ("after", "turns.step"), ("after", "turns.defer_call")])
def test_a_call_that_a_wrapper_or_a_hook_defers(
    harness: Harness, deferring: PydanticAgent[Any, Any], boundary: tuple[Moment, str] | None
) -> None:
    """It waits in its row for a client, also after a crash, although its intent was committed with the reply."""
    _use(harness, deferring, Scripting([_call("render", film="M")], "done").model)
    sent = harness.send()
    if boundary is not None:
        with harness.crashing(*boundary):
            harness.run(sent.session_id)
        harness.move(31)
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert turn["status"] == "parked"
    [pending] = turn["pending_calls"]
    assert (pending["call_id"], pending["arguments"], pending["metadata"]) == ("c1", {"film": "M"}, {"job": 7})
    answer(harness.runtime, sent.turn_id, parse_result({"call_id": "c1", "result": "a film"}))
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert harness.lines(sent.session_id)[2] == ("tool", "a film")


def test_a_deferred_call_without_a_result(harness: Harness, deferring: PydanticAgent[Any, Any]) -> None:
    """At its time limit the model is shown that the outcome is unknown."""
    _use(harness, deferring, Scripting([_call("render", film="M")], "done").model)
    turn = harness.ask()
    harness.move(harness.settings.approval.expires_s + 1)
    harness.run(UUID(turn["session_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "done"
    assert [row.status for row in harness.sql("SELECT status FROM tool_effects")] == ["unknown"]


def _approve_all(ctx: RunContext[Any], requests: DeferredToolRequests) -> Any:
    del ctx
    return requests.build_results(approve_all=True)


def _approving(ran: list[int], metadata: dict[str, Any] | None = None) -> PydanticAgent[Any, Any]:
    """An agent that approves the calls of its tool itself."""
    bare = PydanticAgent(name="assistant", capabilities=[HandleDeferredToolCalls(handler=_approve_all)])

    @bare.tool_plain(requires_approval=True, metadata=metadata)
    def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        return f"paid {amount}"

    return bare


@pytest.mark.parametrize("also", [[], ["c2"]])
def test_a_capability_approves_a_call_of_a_test(also: list[str]) -> None:
    """`ask` runs it as a worker does."""
    ran: list[int] = []
    calls = [_call("pay", name, amount=5) for name in ["c1", *also]]
    made = ask(_approving(ran), "go", model=Scripting(calls, "done").model)
    assert (made.status, made.reply, ran) == ("done", "done", [5] * len(calls))
    assert [(each.status, each.result) for each in made.calls] == [("done", "paid 5")] * len(calls)


def test_a_capability_approves_a_call(harness: Harness) -> None:
    """No person is asked, and the call has a row as any other."""
    ran: list[int] = []
    _use(harness, _approving(ran), Scripting([_call("pay", amount=5), _call("pay", "c2", amount=6)], "done").model)
    turn = harness.ask()
    assert (turn["status"], sorted(ran)) == ("done", [5, 6])
    assert harness.lines(UUID(turn["session_id"]))[2:4] == [("tool", "paid 5"), ("tool", "paid 6")]
    rows = harness.sql("SELECT tool, arguments, status, approver FROM tool_effects ORDER BY position")
    assert [tuple(row) for row in rows] == [
        ("pay", '{"amount":5}', "done", None),
        ("pay", '{"amount":6}', "done", None),
    ]


@pytest.mark.parametrize("kind", ["unsafe", "pure"])
@pytest.mark.parametrize(
    "boundary", [("after", "turns.step"), ("before", "turns.intend_call"), ("after", "turns.intend_call")]
)
def test_a_crash_around_a_call_that_a_capability_approves(
    harness: Harness, kind: Any, boundary: tuple[Moment, str]
) -> None:
    """The call begins once its intent is committed, and is in doubt after that."""
    ran: list[int] = []
    _use(harness, _approving(ran, metadata=effect(kind)), Scripting([_call("pay", amount=5)], "done").model)
    sent = harness.send()
    with harness.crashing(*boundary):
        harness.run(sent.session_id)
    assert ran == []
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    in_doubt = kind == "unsafe" and boundary == ("after", "turns.intend_call")
    assert ran == ([] if in_doubt else [5])
    assert harness.lines(sent.session_id)[2] == ("tool", UNKNOWN_OUTCOME if in_doubt else "paid 5")


LEFT = "SELECT extract(epoch FROM decide_at - perdure_now())::float AS s FROM tool_effects WHERE tool = %(tool)s"


def test_each_sequential_tool_has_its_time_limit(harness: Harness) -> None:
    """The time of the first one does not count towards the second one's, in its row and for its run."""
    bare, left = PydanticAgent(name="assistant"), list[float]()

    @bare.tool_plain(sequential=True)
    def one() -> str:
        """Take long."""
        harness.move(20)
        return "1"

    @bare.tool_plain(sequential=True)
    def two() -> str:
        """Read the time that is left."""
        left.extend(row.s for row in harness.sql(LEFT, tool="two"))
        return "2"

    _use(harness, bare, Scripting([_call("one"), _call("two", "c2")], "done").model)
    assert harness.ask()["status"] == "done"
    assert 29 < left[0] <= harness.settings.turn.tool_timeout_s


def test_a_call_that_begins_at_once_is_not_extended(harness: Harness) -> None:
    """It costs no statement of its own."""
    bare, statements = PydanticAgent(name="assistant"), list[str]()

    @bare.tool_plain
    def act() -> str:
        """Act."""
        return "done"

    _use(harness, bare, Scripting([_call("act"), _call("act", "c2")], "done").model)
    with harness.hooked(lambda _, name: statements.append(name)):
        assert harness.ask()["status"] == "done"
    assert "turns.extend_effect" not in statements


@pytest.mark.parametrize("limit_s", [None, 90.0])
def test_an_approved_call_has_its_tools_time_limit(harness: Harness, limit_s: float | None) -> None:
    """Though the worker that begins it has not planned it."""
    bare, left = PydanticAgent(name="assistant"), list[float]()

    @bare.tool_plain(requires_approval=True, timeout=limit_s)
    def pay() -> str:
        """Pay."""
        left.extend(row.s for row in harness.sql(LEFT, tool="pay"))
        return "paid"

    _use(harness, bare, Scripting([_call("pay")], "done").model)
    turn = harness.ask()
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "c1", "decision": "approve"}))
    harness.run(UUID(turn["session_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "done"
    expected = limit_s or harness.settings.turn.tool_timeout_s
    assert expected - 5 < left[0] <= expected
