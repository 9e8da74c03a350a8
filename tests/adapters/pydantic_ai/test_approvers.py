"""Who approves a call of a tool whose declaration shows only through wrappers of its toolset, or only in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import CombinedToolset, FunctionToolset, RunContext
from pydantic_ai.capabilities import Toolset
from pydantic_ai.tools import ToolDefinition

from perdure import adapt, effect
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.errors import Forbidden, SettingsError
from perdure.turns.calls.approvals import OPERATOR, Decider, decide, parse_decision
from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use
from tests.turns.harness import Harness

USER = Decider.user(UserKey("ana"))


def _staff_above_100(arguments: Any) -> str:
    return "staff" if arguments["amount"] > 100 else "user"


def _pay(ran: list[int], metadata: dict[str, Any] | None = None) -> FunctionToolset[Any]:
    """A toolset with a tool that waits for approval."""
    tools = FunctionToolset[Any]()

    @tools.tool_plain(requires_approval=True, metadata=metadata)
    def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        return f"paid {amount}"

    return tools


def _decide(harness: Harness, turn: dict[str, Any], by: Decider, **arguments: Any) -> None:
    given = {"call_id": "c1", "decision": "approve"} | ({"arguments": arguments} if arguments else {})
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision(given), by)


WRAPPERS: dict[str, Callable[[FunctionToolset[Any]], dict[str, Any]]] = {
    "approval_required": lambda tools: {"toolsets": [tools.approval_required()]},
    "filtered": lambda tools: {"toolsets": [tools.filtered(lambda *_: True)]},
    "prefixed": lambda tools: {"toolsets": [tools.prefixed("shop")]},
    "renamed": lambda tools: {"toolsets": [tools.renamed({"buy": "pay"})]},
    "combined": lambda tools: {"toolsets": [CombinedToolset([tools]).prefixed("shop")]},
    "capability": lambda tools: {"capabilities": [Toolset(tools)]},
    "dynamic": lambda tools: {"toolsets": [lambda _: tools]},
}
NAMES = {"prefixed": "shop_pay", "renamed": "buy", "combined": "shop_pay"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_user_cannot_edit_a_call_into_one_that_staff_approves(harness: Harness, wrapper: str) -> None:
    """However its toolset is wrapped. The user may still approve the arguments that the model chose."""
    ran: list[int] = []
    tools = _pay(ran, metadata=effect("unsafe", approver=_staff_above_100))
    bare = PydanticAgent(name="assistant", **WRAPPERS[wrapper](tools))
    _use(harness, bare, Scripting([_call(NAMES.get(wrapper, "pay"), amount=5)], "done").model)
    turn = harness.ask()
    with pytest.raises(Forbidden, match="with these arguments needs the approval of staff"):
        _decide(harness, turn, USER, amount=1000)
    _decide(harness, turn, USER)
    assert (harness.resume(turn)["status"], ran) == ("done", [5])


@pytest.mark.parametrize("wrapper", ["approval_required", "dynamic"])
def test_staff_decides_once(harness: Harness, wrapper: str) -> None:
    """The run does not ask staff again about arguments that staff has edited."""
    ran: list[int] = []
    tools = _pay(ran, metadata=effect("unsafe", approver=_staff_above_100))
    bare = PydanticAgent(name="assistant", **WRAPPERS[wrapper](tools))
    _use(harness, bare, Scripting([_call("pay", amount=5)], "done").model)
    turn = harness.ask()
    _decide(harness, turn, OPERATOR, amount=1000)
    assert (harness.resume(turn)["status"], ran) == ("done", [1000])


def _prepared(_: RunContext[Any], definitions: list[ToolDefinition]) -> list[ToolDefinition]:
    """Names the approver in a run only."""
    return [replace(each, metadata=effect("unsafe", approver=_staff_above_100)) for each in definitions]


def test_the_run_checks_edited_arguments_with_its_own_definition(harness: Harness) -> None:
    """The turn waits again, for staff, and shows the edited arguments; the user cannot decide any more."""
    ran: list[int] = []
    bare = PydanticAgent(name="assistant", toolsets=[_pay(ran).prepared(_prepared)])
    _use(harness, bare, Scripting([_call("pay", "c0", amount=1), _call("pay", amount=5)], "done").model)
    turn = harness.ask()
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "c0", "decision": "approve"}), USER)
    _decide(harness, turn, USER, amount=1000)
    waiting = harness.resume(turn)
    assert (waiting["status"], ran) == ("waiting_approval", [])
    [pending] = waiting["pending_approvals"]
    assert (pending["call_id"], pending["arguments"]) == ("c1", {"amount": 1000})
    with pytest.raises(Forbidden):
        _decide(harness, turn, USER)
    _decide(harness, turn, OPERATOR)
    assert (harness.resume(turn)["status"], sorted(ran)) == ("done", [1, 1000])


def test_a_call_that_waits_for_staff_again_may_expire(harness: Harness) -> None:
    """The other call of the reply, which the user approved, runs then."""
    ran: list[int] = []
    bare = PydanticAgent(name="assistant", toolsets=[_pay(ran).prepared(_prepared)])
    _use(harness, bare, Scripting([_call("pay", "c0", amount=1), _call("pay", amount=5)], "done").model)
    turn = harness.ask()
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "c0", "decision": "approve"}), USER)
    _decide(harness, turn, USER, amount=1000)
    harness.resume(turn)
    harness.move(harness.settings.approval.expires_s + 1)
    assert (harness.resume(turn)["status"], ran) == ("done", [1])


def test_another_worker_asks_the_same_person(harness: Harness) -> None:
    """A worker that died before it asked leaves the call to one that reads who approves it in its own run."""
    bare = PydanticAgent(name="assistant", toolsets=[_pay([], metadata=effect("pure", approver="staff"))])
    _use(harness, bare, Scripting([_call("pay", amount=5)]).model)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    [row] = harness.sql("SELECT status, approver, effect FROM tool_effects")
    assert tuple(row) == ("asked", "staff", "pure")


@pytest.mark.parametrize("wrapper", [each for each in WRAPPERS if each != "dynamic"])
def test_a_wrong_declaration_in_a_wrapped_toolset_is_refused(wrapper: str) -> None:
    """Before a message is accepted, as for a tool of the agent itself."""
    tools = _pay([], metadata={"perdure": {"approver": "boss"}})
    with pytest.raises(SettingsError, match="accepted: 'user', 'staff'"):
        adapt(PydanticAgent("test", name="a", **WRAPPERS[wrapper](tools)))


def test_metadata_of_a_whole_toolset(harness: Harness) -> None:
    """`with_metadata` declares for each tool of the toolset."""
    tools = _pay([]).with_metadata(**effect("unsafe", approver="staff"))
    harness.agents = Agents([adapt(PydanticAgent("test", name="assistant", toolsets=[tools]))])
    turn = harness.ask()
    assert [row.approver for row in harness.sql("SELECT approver FROM tool_effects")] == ["staff"]
    with pytest.raises(Forbidden, match=r"^This call needs the approval of staff"):
        decide(
            harness.runtime,
            UUID(turn["turn_id"]),
            parse_decision({"call_id": turn["pending_approvals"][0]["call_id"], "decision": "approve"}),
            USER,
        )
