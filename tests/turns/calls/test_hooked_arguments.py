"""What a `before_tool` hook changes of a call's arguments is checked and recorded; what it leaves stays as it was."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import (
    AfterValidator,
    Base64Bytes,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    SecretStr,
    computed_field,
)

from perdure import Agent, external_tool, required, tool
from perdure.hooks import ToolCalling
from perdure.testing import Scripted, ask, call
from perdure.tools.registry import Tool
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

Cents = Annotated[int, BeforeValidator(lambda value: round(float(value) * 100))]


class Serialized(BaseModel):
    full_name: str = Field(serialization_alias="fullName")


class Validated(BaseModel):
    number: int = Field(validation_alias="num")


class Excluded(BaseModel):
    number: int
    token: str = Field(exclude=True)


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def area(self) -> int:
        """The area of a square."""
        return self.width**2


class Incomparable:
    """A value without an equality, as clients and handles are."""

    def __init__(self, text: str) -> None:
        self.text = text


@dataclass
class Locked:
    """A value that cannot be copied."""

    lock: Any


def _tool_of(annotation: Any) -> Tool:
    """A tool with an argument of this type. It keeps what it was called with."""
    got: list[Any] = []

    def act(value: Any, region: str = "us") -> str:
        """Act."""
        got.append(value)
        return region

    act.__annotations__["value"] = annotation
    made: Tool = tool(effect="idempotent")(act)
    made.function.__dict__["got"] = got
    return made


def _in_europe(seen: ToolCalling) -> ToolCalling:
    return seen.replace(arguments={**seen.arguments, "region": "eu"})


def _unchanged(seen: ToolCalling) -> ToolCalling:
    return seen.replace(arguments=dict(seen.arguments))


CONVERTED: list[tuple[Any, Any]] = [
    (Cents, 500),
    (Annotated[int, AfterValidator(lambda value: value * 100)], 5),
    (Annotated[list[str], BeforeValidator(lambda value: value.split(","))], "a,b"),
    (SecretStr, "hunter2"),
    (list[SecretStr], ["hunter2"]),
    (Base64Bytes, "aGVsbG8="),
    (Json[list[int]], "[1]"),
    (Serialized, {"full_name": "Ana"}),
    (Validated, {"num": 1}),
    (Excluded, {"number": 1, "token": "t"}),
    (Computed, {"width": 2}),
    (Annotated[Any, AfterValidator(Incomparable)], "incomparable"),
    (Annotated[Any, AfterValidator(lambda _: Locked(threading.Lock()))], "locked"),
]


@pytest.mark.parametrize(("annotation", "written"), CONVERTED)
def test_what_a_hook_leaves_is_not_converted_again(annotation: Any, written: Any) -> None:
    """A hook that changes another argument, or none, leaves the value that the model wrote."""
    seen = []
    for hooks in ([], [required(_unchanged)], [required(_in_europe)], [_in_europe, _unchanged]):
        act = _tool_of(annotation)
        agent = Agent("clerk", "You act.", [act], before_tool=hooks)
        [made] = ask(agent, "Act!", model=Scripted(call("act", value=written), "Done.")).calls
        assert made.status == "done", made.result
        assert made.result == ("eu" if _in_europe in [getattr(each, "function", each) for each in hooks] else "us")
        seen += act.function.__dict__["got"]
    assert len(seen) == 4
    if not isinstance(seen[0], Incomparable | Locked):
        assert seen == [seen[0]] * 4


def test_after_a_crash_the_arguments_are_still_those_of_the_model(harness: Harness) -> None:
    """The row of a call has what the model wrote, and what a hook has changed: a resumed call converts it once."""
    settle = _tool_of(Cents)
    harness.equip(settle, before_tool=[required(_in_europe)])
    harness.script(calls(("act", {"value": 5})), says("Done."))
    sent = harness.send()
    with harness.crashing("before", "turns.step", nth=2):
        harness.run(sent.session_id)
    harness.move(100)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert settle.function.__dict__["got"] == [500, 500]
    [row] = harness.sql("SELECT arguments FROM tool_effects")
    assert json.loads(row.arguments) == {"value": 5, "region": "eu"}
    harness.check()


def test_a_changed_value_is_converted_like_one_of_the_model() -> None:
    """A hook gives a value as the model would write it."""
    act = _tool_of(Cents)
    agent = Agent("clerk", "You act.", [act], before_tool=[lambda seen: seen.replace(arguments={"value": 3})])
    ask(agent, "Act!", model=Scripted(call("act", value=5), "Done."))
    assert act.function.__dict__["got"] == [300]


def _edits(value: Any, *, replaces: bool) -> Any:
    def hook(seen: ToolCalling) -> ToolCalling | None:
        seen.arguments["number"] = value  # type: ignore[index]  # a mapping that is a dictionary
        return seen.replace(arguments=seen.arguments) if replaces else None

    return hook


@pytest.mark.parametrize(
    ("hooks", "result"),
    [
        ([_edits("fifty", replaces=True)], "refused: number: input should be a valid integer"),
        ([_edits(10**6, replaces=True)], "A hook changed the arguments of pay to some that need an approval"),
        ([_edits(True, replaces=True)], "paid 1"),
        ([_edits(50, replaces=True)], "paid 50"),
        ([_edits(10**6, replaces=False)], "paid 1"),
        ([_edits(10**6, replaces=False), _unchanged], "paid 1"),
        ([_edits(50, replaces=True), _edits(10**6, replaces=False)], "paid 50"),
    ],
)
def test_a_hook_that_edits_in_place_is_checked(hooks: list[Any], result: str) -> None:
    """An edit counts if the hook returns it, and passes the type check and the approval like any other change."""

    @tool(requires_approval=lambda arguments: arguments["number"] > 100)
    def pay(number: int) -> str:
        """Pay."""
        return f"paid {number}"

    agent = Agent("clerk", "You pay.", [pay], before_tool=[required(each) for each in hooks])
    [made] = ask(agent, "Pay!", model=Scripted(call("pay", number=1), "Done."), approve=False).calls
    assert result in (made.result or "")


def test_edits_of_nested_values_are_recorded(harness: Harness) -> None:
    """The row shows the arguments with which the tool ran."""
    got = []

    @tool
    def add(names: list[str]) -> str:
        """Add names."""
        got.append(names)
        return "added"

    def extend(seen: ToolCalling) -> ToolCalling:
        seen.arguments["names"].append("Bo")
        return seen.replace(arguments=seen.arguments)

    harness.equip(add, before_tool=[required(extend)])
    harness.script(calls(("add", {"names": ["Ana"]})), says("Done."))
    harness.ask()
    [row] = harness.sql("SELECT arguments FROM tool_effects")
    assert json.loads(row.arguments) == {"names": got[0]} == {"names": ["Ana", "Bo"]}


def test_functions_about_approval_get_copies() -> None:
    """What they do with the arguments does not reach the tool."""

    def needs(arguments: Any) -> bool:
        arguments["names"].clear()
        return True

    def approver(arguments: Any) -> str:
        arguments.clear()
        return "user"

    @tool(requires_approval=needs, approver=approver)
    def add(names: list[str]) -> str:
        """Add names."""
        return f"added {names}"

    [made] = ask(
        Agent("clerk", "You add.", [add]), "Add!", model=Scripted(call("add", names=["Ana"]), "Done."), approve=True
    ).calls
    assert made.result == "added ['Ana']"


def test_hooks_before_a_call_outside(harness: Harness) -> None:
    """What a client gets is what the model wrote, except for what a hook changed."""

    def scan(names: Annotated[list[str], BeforeValidator(lambda value: value.split(","))], region: str = "us") -> str:
        """Scan."""
        return f"{names} {region}"

    harness.equip(external_tool("scan", parameters=scan), before_tool=[required(_in_europe)])
    harness.script(calls(("scan", {"names": "a,b"})))
    sent = harness.send()
    harness.run(sent.session_id)
    [row] = harness.sql("SELECT arguments, status FROM tool_effects")
    assert json.loads(row.arguments) == {"names": "a,b", "region": "eu"}
    assert row.status == "intended"
