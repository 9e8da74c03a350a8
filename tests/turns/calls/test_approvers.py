"""A tool names whose approval its calls need. Only staff decides about calls that staff approves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, ApprovalWaiting, McpServer, ToolCalling, adapt, celery_tool, effect, tool
from perdure.access.tenants import UserKey, user_key
from perdure.agents import Agents
from perdure.errors import Forbidden, GuardRejected, SettingsError
from perdure.hooks import required
from perdure.testing import Scripted, ask, call
from perdure.turns.calls import queries
from perdure.turns.calls.approvals import OPERATOR, Decider, decide, parse_decision
from perdure.turns.calls.waiting import find_waiting, list_waiting
from perdure.turns.outbox import Delivered, deliver
from perdure.users.export import export_user
from perdure.users.queries import FORGET_DECIDER
from tests.plans import plans
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

ANA = Decider.user(UserKey("ana"))


@tool(requires_approval=True, approver="staff")
def refund(cents: int) -> str:
    """Refund."""
    return f"refunded {cents}"


@tool(requires_approval=True)
def order(item: str) -> str:
    """Order."""
    return f"ordered {item}"


@tool(requires_approval=True, approver=lambda arguments: "user" if arguments["cents"] < 100 else "staff")
def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


hire = celery_tool("shop.hire", requires_approval=True, approver="staff")


@pytest.fixture(autouse=True)
def equipped(harness: Harness) -> None:
    """Give the agent the tools."""
    harness.equip(refund, order, pay, hire)


def _waiting(harness: Harness, name: str, arguments: dict[str, Any], **given: Any) -> dict[str, Any]:
    harness.script(calls((name, arguments)), says("done"))
    turn = harness.ask(**given)
    assert turn["status"] == "waiting_approval"
    return turn


def _decide(harness: Harness, turn: dict[str, Any], by: Decider, decision: str = "approve", **given: Any) -> None:
    wanted = parse_decision({"call_id": "call_0", "decision": decision, **given})
    decide(harness.runtime, UUID(turn["turn_id"]), wanted, by)


@pytest.mark.parametrize(("name", "arguments"), [("refund", {"cents": 5}), ("pay", {"cents": 100}), ("shop_hire", {})])
@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_the_user_cannot_decide_what_staff_approves(
    harness: Harness, name: str, arguments: dict[str, Any], decision: str
) -> None:
    """Otherwise a customer approves the customer's own refund."""
    turn = _waiting(harness, name, arguments)
    assert turn["pending_approvals"][0]["approver"] == "staff"
    for by in (ANA, Decider("unknown")):
        with pytest.raises(Forbidden, match="the approval of staff"):
            _decide(harness, turn, by, decision)
    assert harness.turn(UUID(turn["turn_id"]))["pending_approvals"] == turn["pending_approvals"]
    _decide(harness, turn, OPERATOR, decision)
    [decided] = harness.turn(UUID(turn["turn_id"]))["decisions"]
    assert (decided["call_id"], decided["tool"], decided["decision"]) == ("call_0", name, decision)
    assert decided["decided_by"] == "operator"


@pytest.mark.parametrize(("name", "arguments"), [("order", {"item": "tea"}), ("pay", {"cents": 99})])
def test_the_user_decides_about_other_calls(harness: Harness, name: str, arguments: dict[str, Any]) -> None:
    """The default approver is the user of the turn; the decision names the user without the tenant."""
    turn = _waiting(harness, name, arguments)
    assert turn["pending_approvals"][0]["approver"] == "user"
    _decide(harness, turn, Decider.user(UserKey("acme\x1fana")))
    harness.run(UUID(turn["session_id"]))
    done = harness.turn(UUID(turn["turn_id"]))
    assert (done["status"], done["decisions"][0]["decided_by"]) == ("done", "user:ana")


def test_edited_arguments_name_the_approver_again(harness: Harness) -> None:
    """Otherwise a user lets a small amount wait and approves it as a large one."""
    turn = _waiting(harness, "pay", {"cents": 99})
    with pytest.raises(Forbidden):
        _decide(harness, turn, ANA, arguments={"cents": 100})
    _decide(harness, turn, ANA, arguments={"cents": 98})
    large = _waiting(harness, "pay", {"cents": 100}, user_id="ben")
    with pytest.raises(Forbidden):
        _decide(harness, large, Decider.user(UserKey("ben")), arguments={"cents": 1})


def test_edited_arguments_of_an_mcp_tool_name_the_approver_again(harness: Harness) -> None:
    """A decision needs no connection to the server, so the server's declaration names the approver."""
    server = McpServer(
        "bank",
        url="http://127.0.0.1:9/mcp",
        requires_approval={"pay": True},
        approver={"pay": lambda arguments: arguments["cents"] < 100},
    )
    turn = _waiting(harness, "pay", {"cents": 5})
    harness.equip(server)
    harness.sql("UPDATE tool_effects SET tool = 'bank:pay'")
    with pytest.raises(Forbidden):
        _decide(harness, turn, ANA, arguments={"cents": 100})
    _decide(harness, turn, ANA, arguments={"cents": 99})


@pytest.mark.parametrize("found", [None, "boss", 1, "raises"])
def test_staff_approves_if_a_function_names_no_approver(found: Any) -> None:
    """A function that fails must not let the user approve."""

    def name(arguments: Mapping[str, Any]) -> object:
        return arguments["no such"] if found == "raises" else found

    odd = tool(requires_approval=True, approver=name)(pay.function)
    assert odd.approver_of({"cents": 1}) == "staff"
    yes = tool(requires_approval=True, approver=lambda _: True)(pay.function)
    no = tool(requires_approval=True, approver=lambda _: False)(pay.function)
    assert (yes.approver_of({}), no.approver_of({})) == ("user", "staff")


def test_an_invalid_approver_is_refused() -> None:
    """A wrong declaration fails where it is written. An approver without approval would protect nothing."""

    async def slow(_arguments: object) -> str:
        return "user"

    for given in ({"approver": "boss", "requires_approval": True}, {"approver": slow, "requires_approval": True},
                  {"approver": "staff"}, {"approver": None, "requires_approval": True}):  # fmt: skip
        with pytest.raises(SettingsError, match="approver"):
            tool(**given)(pay.function)
        with pytest.raises(SettingsError, match="approver"):
            celery_tool("shop.pay", **given)
        with pytest.raises(SettingsError, match="approver"):
            McpServer("bank", url="http://127.0.0.1:9/mcp", **given)
    with pytest.raises(SettingsError, match="approver"):
        McpServer("bank", url="http://127.0.0.1:9/mcp", requires_approval={"a": True}, approver={"b": "staff"})


def test_waiting_calls_are_listed_by_user_and_tenant(harness: Harness) -> None:
    """The list has the waiting calls only, longest wait first, in pages."""
    turns = [
        _waiting(harness, "refund", {"cents": n}, user_id=user) for n, user in enumerate(("ana", "x\x1fana", "ben"))
    ]
    first = list_waiting(harness.database, all_tenants=True)
    assert [each.body["turn_id"] for each in first] == [turn["turn_id"] for turn in turns]
    assert first[0].body == {
        "turn_id": turns[0]["turn_id"],
        "session_id": turns[0]["session_id"],
        "user_id": "ana",
        "agent": "assistant",
        "call_id": "call_0",
        "tool": "refund",
        "arguments": {"cents": 0},
        "approver": "staff",
        "waiting_since": first[0].body["waiting_since"],
        "expires_at": first[0].body["expires_at"],
    }
    assert first[0].body["waiting_since"] < first[0].body["expires_at"]

    def users(**given: Any) -> list[str]:
        return [each.user for each in list_waiting(harness.database, **given)]

    assert users() == ["ana", "ben"]
    assert users(tenant="x") == ["x\x1fana"]
    assert users(user="ben") == ["ben"]
    assert users(all_tenants=True, limit=2) == ["ana", "x\x1fana"]
    assert users(all_tenants=True, after=first[1].effect_id) == ["ben"]
    _decide(harness, turns[0], OPERATOR)
    assert users() == ["ben"]
    assert find_waiting(harness.database, UUID(turns[0]["turn_id"]), "call_0") is None
    harness.move(harness.settings.approval.expires_s + 1)
    assert users(all_tenants=True) == []


def test_the_list_reads_the_waiting_calls_by_index(harness: Harness) -> None:
    """The list must not read all calls that were ever made."""
    turn = _waiting(harness, "refund", {"cents": 5})
    harness.sql(
        "INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,"
        " intended_at, decide_at) SELECT gen_random_uuid(), turn_id, 1000 + n, 0, 'x', '{}', 'pure', 'done', now(),"
        " now() FROM turns, generate_series(1, 20000) AS n"
    )
    harness.sql("ANALYZE tool_effects")
    given = {"user_id": "ana", "tenant": "x", "after": UUID(int=0), "limit": 100, "turn_id": turn["turn_id"]}
    listed = (queries.WAITING, queries.WAITING_OF_TENANT, queries.WAITING_WITHOUT_TENANT, queries.WAITING_OF_USER)
    for statement in (*listed, FORGET_DECIDER):
        for nodes in plans(harness.database, statement, given):
            scanned = {node.get("Relation Name") for node in nodes if node["Node Type"] == "Seq Scan"}
            assert "tool_effects" not in scanned, statement.name


class _Carrier:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        del target, message_id
        self.bodies.append(body)


@pytest.mark.parametrize("kind", ["url", "task"])
def test_the_receiver_of_a_reply_is_told_that_a_call_waits(harness: Harness, kind: str) -> None:
    """An application learns that a call waits by a callback with the turn, and later receives the reply."""
    harness.settings = harness.settings.model_copy(update={"reply_tasks": ("shop.answer",)})
    target = {"url": "https://a.example"} if kind == "url" else {"task": "shop.answer"}
    turn = _waiting(harness, "refund", {"cents": 6}, reply_to=target)
    carrier = _Carrier()
    [delivery_id] = harness.waker.deliveries
    assert isinstance(deliver(harness.database, {kind: carrier}, delivery_id), Delivered)
    [body] = carrier.bodies
    assert b'"status": "waiting_approval"' in body
    assert b'"approver": "staff"' in body
    _decide(harness, turn, OPERATOR)
    harness.run(UUID(turn["session_id"]))
    assert isinstance(deliver(harness.database, {kind: carrier}, harness.waker.deliveries[1]), Delivered)
    assert b'"status": "done"' in carrier.bodies[1]


def test_a_late_request_for_approval_is_not_sent(harness: Harness) -> None:
    """A receiver that was away needs no request for a call that is decided, only the reply."""
    turn = _waiting(harness, "refund", {"cents": 5}, reply_to={"url": "https://a.example"})
    _decide(harness, turn, OPERATOR)
    carrier = _Carrier()
    assert isinstance(deliver(harness.database, {"url": carrier}, harness.waker.deliveries[0]), Delivered)
    assert carrier.bodies == []


def test_hooks_are_called_when_a_call_begins_to_wait(harness: Harness) -> None:
    """A hook can tell staff, also after a crash between the call's commit and the beginning of the wait."""
    seen: list[ApprovalWaiting] = []
    harness.equip(refund, on_approval_waiting=[seen.append])
    harness.script(calls(("refund", {"cents": 5})), says("done"))
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    assert seen == []
    harness.move(harness.settings.turn.lease_s + 10)
    harness.run(sent.session_id)
    [waiting] = seen
    assert (waiting.call.tool, waiting.call.arguments, waiting.call_id) == ("refund", {"cents": 5}, "call_0")
    assert (waiting.call.user_id, waiting.call.turn_id, waiting.approver) == ("ana", sent.turn_id, "staff")


def test_a_required_hook_that_fails_ends_the_turn() -> None:
    """`required` has the meaning that it has for other hooks."""

    def refuse(_waiting: ApprovalWaiting) -> None:
        raise GuardRejected("Nobody can approve this now.")

    agent = Agent("assistant", "You help.", [refund], on_approval_waiting=[required(refuse)])
    answer = ask(agent, "refund", model=Scripted(call("refund", cents=5)))
    assert (answer.status, answer.reply) == ("failed", "Nobody can approve this now.")


def test_a_unit_test_sees_the_approver() -> None:
    """An author can test whose approval a call needs, without servers."""
    answer = ask(Agent("assistant", "You help.", [pay]), "pay", model=Scripted(call("pay", cents=500)))
    assert (answer.status, answer.calls[0].approver) == ("waiting_approval", "staff")


def test_an_erased_user_is_no_longer_named_in_decisions(harness: Harness) -> None:
    """A decision about another user's call names its author, whose erasure must reach it, and no other decision."""
    turns = {decider: _waiting(harness, "refund", {"cents": 5}, user_id=f"of {decider}") for decider in ("boss", "bea")}
    for decider, turn in turns.items():
        _decide(harness, turn, Decider.user(UserKey(decider), is_staff=True))
    harness.runtime.eraser.erase(UserKey("boss"))
    decisions = [harness.turn(UUID(turn["turn_id"]))["decisions"] for turn in turns.values()]
    assert [[each["decided_by"] for each in of_turn] for of_turn in decisions] == [["user:"], ["user:bea"]]


def test_an_export_names_a_decider_without_the_tenant(harness: Harness) -> None:
    """`decided_by` is stored with the decider's key, and no document contains a key."""
    ana, boss = user_key("acme", "ana"), user_key("acme", "boss")
    turn = _waiting(harness, "refund", {"cents": 5}, user_id=ana)
    _decide(harness, turn, Decider.user(boss, is_staff=True))
    document = export_user(harness.database, harness.clock, None, ana)
    assert [each["decided_by"] for each in document["tables"]["tool_effects"]] == ["user:boss"]
    assert "\\u001f" not in json.dumps(document)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_hook_changes_no_call_that_the_user_approved_into_one_for_staff(harness: Harness, *, adapted: bool) -> None:
    """The user saw the arguments of the model, and staff was not asked."""

    def tenfold(call: ToolCalling) -> ToolCalling:
        return call.replace(arguments={"cents": call.arguments["cents"] * 10})

    bare = PydanticAgent(name="assistant", instructions="You help.")
    bare.tool_plain(requires_approval=True, metadata=effect("unsafe", approver=pay.approver))(pay.function)
    hooks = [required(tenfold)]
    own = Agent("assistant", "You help.", [pay], before_tool=hooks)
    harness.agents = Agents([adapt(bare, before_tool=hooks) if adapted else own])
    results = []
    for cents in (5, 50):
        turn = _waiting(harness, "pay", {"cents": cents})
        _decide(harness, turn, ANA)
        harness.run(UUID(turn["session_id"]))
        results += [each["content"] for each in harness.messages(UUID(turn["session_id"])) if each["role"] == "tool"]
    assert results[0] == "paid 50"
    assert "paid 500" not in results
    assert "need the approval of staff" in results[-1]
