"""What is certified of a module: its scenarios, or arguments that fit the schemas of its tools."""

from __future__ import annotations

import json
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from perdure import Agent, ask_user, celery_tool, tool
from perdure.agents import Agents
from perdure.certify.arguments import NotDerived, arguments_of
from perdure.certify.certification import Certification, Scenario
from perdure.certify.scenarios import load, plan
from perdure.errors import SettingsError
from perdure.testing import call


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Line(BaseModel):
    article: str = Field(min_length=6)
    pieces: int = Field(ge=3, le=9)
    size: Size


@tool
def deliver(  # noqa: PLR0917 (one of each kind)
    lines: Annotated[list[Line], Field(min_length=1)],
    day: date,
    by: Literal["bike", "car"],
    weight: Annotated[float, Field(gt=2, multiple_of=0.5)],
    note: str | None,
    code: Annotated[str, Field(examples=["A-1"], pattern="^[A-Z]-[0-9]$")],
    fast: bool = False,
) -> str:
    """Deliver an order."""
    return "Delivered."


@tool
def coded(code: Annotated[str, Field(pattern="^[A-Z]{3}$")]) -> str:
    """Take a code."""
    return code


def test_arguments_fit_the_schema() -> None:
    """The tool itself takes what is derived, and its optional parameters keep their defaults."""
    arguments = arguments_of(deliver.parameters)
    parsed = deliver.parse(arguments)
    assert json.loads(arguments)["lines"] == [{"article": "textxx", "pieces": 3, "size": "small"}]
    assert (parsed["by"], parsed["weight"], parsed["code"], parsed["fast"]) == ("bike", 2.5, "A-1", False)


def test_arguments_that_cannot_be_derived_are_named() -> None:
    with pytest.raises(NotDerived, match="no value of code can be derived: it must match"):
        arguments_of(coded.parameters)
    endless = {"$ref": "#/$defs/node", "$defs": {"node": {"$ref": "#/$defs/node"}}}
    with pytest.raises(NotDerived, match="refers to itself"):
        arguments_of({"properties": {"node": endless}, "required": ["node"], **endless})


assistant = Agent(
    "assistant",
    "You help.",
    tools=[deliver, coded, celery_tool("reports.make", name="report", effect="idempotent", timeout_s=60), ask_user()],
)


def _plan(*scenarios: Scenario, only: tuple[str, ...] = ()) -> Any:
    return plan(Agents([assistant]), Certification(list(scenarios)), only)


def test_a_tool_without_a_scenario_is_called_alone() -> None:
    made = _plan(Scenario(call("coded", code="ABC"), "Thank you."))
    assert [sorted(each.tools) for _, each in made.scenarios] == [["coded"], ["deliver"]]
    assert {tool_name: reason for (_, tool_name), reason in made.left_out.items()} == {
        "report": "waits for a Celery task",
        "ask_user": "waits for the user",
    }


def test_a_tool_without_arguments_is_left_out_with_the_reason() -> None:
    made = _plan()
    assert set(made.tools) == {("assistant", "deliver")}
    assert made.left_out["assistant", "coded"].endswith("'^[A-Z]{3}$'; give it a Scenario")


def test_only_some_tools_are_certified() -> None:
    made = _plan(Scenario([call("coded", code="ABC"), call("deliver")]), only=("coded",))
    assert (set(made.tools), len(made.scenarios)) == ({("assistant", "coded")}, 1)
    with pytest.raises(SettingsError, match="there is no tool 'sing'; known: coded, deliver"):
        _plan(only=("sing",))


def test_a_scenario_of_a_tool_that_the_module_lacks_is_refused() -> None:
    with pytest.raises(SettingsError, match="a Scenario calls sing, but the module lacks an agent with these"):
        _plan(Scenario(call("sing")))


@pytest.mark.parametrize("replies", [(), ("Hello.",), ("Hello.", call("sing")), (["sing"],), ([],)])
def test_a_scenario_without_calls_is_refused(replies: tuple[Any, ...]) -> None:
    with pytest.raises(SettingsError, match="Scenario has"):
        Scenario(*replies)


def test_a_module_without_agents_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"the module is 'json': the module defines no Agent"):
        load("json")
