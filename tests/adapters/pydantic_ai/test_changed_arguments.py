"""What a `before_tool` hook changes of an adapted agent's call is checked and recorded; what it leaves stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import AfterValidator, Base64Bytes, BaseModel, BeforeValidator, Field, Json, SecretStr
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import FunctionToolset, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.tools import ToolDefinition

from perdure import adapt, effect, required
from perdure.access.tenants import UserKey
from perdure.hooks import ToolCalling
from perdure.testing import Scripted, ask, call
from perdure.turns.calls.approvals import Decider, decide, parse_decision
from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use
from tests.turns.harness import Harness

Cents = Annotated[int, BeforeValidator(lambda value: round(float(value) * 100))]


class Serialized(BaseModel):
    full_name: str = Field(serialization_alias="fullName")


class Incomparable:
    """A value without an equality, as clients and handles are."""

    def __init__(self, text: str) -> None:
        self.text = text


def _tools(annotation: Any, got: list[Any], **declared: Any) -> FunctionToolset[Any]:
    """A toolset with a tool that has an argument of this type, and that keeps what it is called with."""

    def act(value: Any, region: str = "us") -> str:
        """Act."""
        got.append(value)
        return region

    act.__annotations__["value"] = annotation
    made = FunctionToolset[Any]()
    made.add_function(act, metadata=effect("idempotent"), **declared)
    return made


def _in_europe(seen: ToolCalling) -> ToolCalling:
    return seen.replace(arguments={**seen.arguments, "region": "eu"})


def _unchanged(seen: ToolCalling) -> ToolCalling:
    return seen.replace(arguments=dict(seen.arguments))


WRAPPERS: dict[str, Callable[[FunctionToolset[Any]], Any]] = {
    "plain": lambda tools: tools,
    "prefixed": lambda tools: tools.prefixed("shop"),
    "dynamic": lambda tools: lambda _: tools,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("annotation", "written"),
    [
        (Cents, 500),
        (Annotated[int, AfterValidator(lambda value: value * 100)], 5),
        (Annotated[list[str], BeforeValidator(lambda value: value.split(","))], "a,b"),
        (SecretStr, "hunter2"),
        (Base64Bytes, "aGVsbG8="),
        (Json[list[int]], "[1]"),
        (Serialized, {"full_name": "Ana"}),
        (Annotated[Any, AfterValidator(Incomparable)], "incomparable"),
    ],
)
def test_what_a_hook_leaves_is_not_converted_again(annotation: Any, written: Any, wrapper: str) -> None:
    """A hook that changes another argument, or none, leaves the value that the model wrote."""
    name = "shop_act" if wrapper == "prefixed" else "act"
    seen: list[Any] = []
    for hooks, region in (([], "us"), ([_unchanged], "us"), ([_in_europe], "eu"), ([_in_europe, _unchanged], "eu")):
        bare = PydanticAgent(name="clerk", toolsets=[WRAPPERS[wrapper](_tools(annotation, seen))])
        agent = adapt(bare, before_tool=[required(hook) for hook in hooks])
        [made] = ask(agent, "Act!", model=Scripted(call(name, value=written), "Done.")).calls
        assert (made.status, made.result) == ("done", region)
    assert len(seen) == 4
    if not isinstance(seen[0], Incomparable):
        assert seen == [seen[0]] * 4


def test_after_a_crash_the_arguments_are_still_those_of_the_model(harness: Harness) -> None:
    """The row of a call has what the model wrote, and what a hook has changed: a resumed call converts it once."""
    got: list[Any] = []
    bare = PydanticAgent(name="assistant", toolsets=[_tools(Cents, got)])
    _use(harness, bare, Scripting([_call("act", value=5)], "done").model, before_tool=[required(_in_europe)])
    sent = harness.send()
    with harness.crashing("before", "turns.step", nth=2):
        harness.run(sent.session_id)
    harness.move(100)
    harness.run(sent.session_id)
    assert (harness.turn(sent.turn_id)["status"], got) == ("done", [500, 500])
    assert _rows(harness) == [{"value": 5, "region": "eu"}]


@pytest.mark.parametrize("edited", [None, {"value": 7}, {"value": 7, "region": "asia"}])
@pytest.mark.parametrize("crashes", [False, True])
def test_an_approved_call(harness: Harness, edited: dict[str, Any] | None, *, crashes: bool) -> None:
    """What a person wrote at the approval stays, too, also if another worker resumes the call."""
    got: list[Any] = []
    bare = PydanticAgent(name="assistant", toolsets=[_tools(Cents, got, requires_approval=True)])
    _use(harness, bare, Scripting([_call("act", value=5)], "done").model, before_tool=[required(_in_europe)])
    turn = harness.ask()
    given = {"call_id": "c1", "decision": "approve"} | ({} if edited is None else {"arguments": edited})
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision(given), Decider.user(UserKey("ana")))
    if crashes:
        with harness.crashing("before", "turns.step"):
            harness.run(UUID(turn["session_id"]))
        harness.move(100)
    harness.run(UUID(turn["session_id"]))
    value = 5 if edited is None else 7
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "done"
    assert got == [value * 100] * (2 if crashes else 1)
    assert _rows(harness) == [{"value": value, "region": "eu"}]


def test_a_user_approves_what_the_model_wrote(harness: Harness) -> None:
    """The function that names the approver gets the arguments as they are written, also those that a hook changed."""

    def staff_above_100(arguments: Any) -> str:
        return "staff" if arguments["value"] > 100 else "user"

    def more(seen: ToolCalling) -> ToolCalling:
        return seen.replace(arguments={"value": 1000})

    for hook, result in ((_in_europe, "eu"), (more, "need the approval of staff")):
        got: list[Any] = []
        tools = _tools(Cents, got, requires_approval=True)
        declared = effect("idempotent", approver=staff_above_100)
        bare = PydanticAgent(name="assistant", toolsets=[tools.with_metadata(**declared)])
        _use(harness, bare, Scripting([_call("act", value=5)], "done").model, before_tool=[required(hook)])
        turn = harness.ask()
        approval = parse_decision({"call_id": "c1", "decision": "approve"})
        decide(harness.runtime, UUID(turn["turn_id"]), approval, Decider.user(UserKey("ana")))
        harness.run(UUID(turn["session_id"]))
        lines = harness.lines(UUID(turn["session_id"]))
        assert result in [content for role, content in lines if role == "tool"][-1]
        assert got == ([500] if hook is _in_europe else [])


def test_a_changed_value_is_converted_like_one_of_the_model() -> None:
    """A hook gives a value as the model would write it."""
    got: list[Any] = []
    bare = PydanticAgent(name="clerk", toolsets=[_tools(Cents, got)])
    agent = adapt(bare, before_tool=[required(lambda seen: seen.replace(arguments={"value": 3}))])
    ask(agent, "Act!", model=Scripted(call("act", value=5), "Done."))
    assert got == [300]


def _edits(value: Any, *, replaces: bool) -> Any:
    def hook(seen: ToolCalling) -> ToolCalling | None:
        seen.arguments["numbers"].append(value)
        return seen.replace(arguments=seen.arguments) if replaces else None

    return required(hook)


@pytest.mark.parametrize(
    ("hooks", "result", "row"),
    [
        ([_edits("many", replaces=True)], "do not fit", [1]),
        ([_edits(object(), replaces=True)], "without a JSON form", [1]),
        ([_edits("2", replaces=True)], "[1, 2]", [1, "2"]),
        ([_edits(2, replaces=False)], "[1]", [1]),
        ([_edits(2, replaces=False), required(_unchanged)], "[1]", [1]),
        ([_edits(2, replaces=True), _edits(3, replaces=False)], "[1, 2]", [1, 2]),
    ],
)
def test_a_hook_that_edits_in_place_is_checked(harness: Harness, hooks: list[Any], result: str, row: list[Any]) -> None:
    """An edit counts if the hook returns it, and is checked and recorded like any other change."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain
    def add(numbers: list[int]) -> str:
        """Add numbers."""
        return str(numbers)

    _use(harness, bare, Scripting([_call("add", numbers=[1])], "done").model, before_tool=hooks)
    turn = harness.ask()
    [told] = [content for role, content in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert result in told
    assert _rows(harness) == [{"numbers": row}]


def test_an_argument_with_an_alias() -> None:
    """The model writes the alias, and the hook sees the name."""
    bare = PydanticAgent(name="clerk")

    @bare.tool_plain
    def act(value: Annotated[Cents, Field(alias="amount")], region: str = "us") -> str:
        """Act."""
        return f"{value} {region}"

    agent = adapt(bare, before_tool=[required(_in_europe)])
    [made] = ask(agent, "Act!", model=Scripted(call("act", amount=5), "Done.")).calls
    assert made.result == "500 eu"


class Order(BaseModel):
    pieces: Cents
    item: str = "tea"


def test_a_single_model_as_the_argument(harness: Harness) -> None:
    """The model writes the members, and the hook sees the model."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain
    def buy(order: Order) -> str:
        """Buy."""
        return f"{order.pieces} {order.item}"

    def change(seen: ToolCalling) -> ToolCalling:
        return seen.replace(arguments={"order": {"pieces": 3, "item": "milk"}})

    for hook, result in ((_unchanged, "500 tea"), (change, "300 milk")):
        _use(harness, bare, Scripting([_call("buy", pieces=5)], "done").model, before_tool=[required(hook)])
        turn = harness.ask()
        lines = harness.lines(UUID(turn["session_id"]))
        assert [content for role, content in lines if role == "tool"][-1] == result


class Injecting(AbstractCapability[Any]):
    """Gives each call the tenant, and doubles its value, after pydantic-ai has converted the arguments."""

    async def before_tool_execute(
        self, ctx: RunContext[Any], *, call: ToolCallPart, tool_def: ToolDefinition, args: dict[str, Any]
    ) -> dict[str, Any]:
        return {**args, "tenant": "acme", "value": args["value"] * 2}


def test_what_a_capability_changed_stays() -> None:
    """A hook of perdure that changes another argument does not undo it."""
    got: list[Any] = []
    tools = FunctionToolset[Any]()

    @tools.tool_plain
    def act(value: Cents, tenant: str = "", region: str = "us") -> str:
        """Act."""
        got.append((value, tenant, region))
        return "done"

    bare = PydanticAgent(name="clerk", toolsets=[tools], capabilities=[Injecting()])
    ask(adapt(bare, before_tool=[required(_in_europe)]), "Act!", model=Scripted(call("act", value=5), "Done."))
    assert got == [(1000, "acme", "eu")]


def _rows(harness: Harness) -> list[Any]:
    return [json.loads(row.arguments) for row in harness.sql("SELECT arguments FROM tool_effects")]
