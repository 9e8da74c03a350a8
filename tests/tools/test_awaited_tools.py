"""The declarations, schemas and arguments of `celery_tool`, `external_tool` and `sleep_until`."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from pydantic import BaseModel

from perdure import Agent, SleepUntil, celery_tool, external_tool
from perdure.errors import SettingsError, ToolError
from perdure.testing import Scripted, ask, call
from perdure.tools.registry import ToolContext
from perdure.turns.additions import Additions, client_tool

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
APP = Celery("shop", set_as_current=False)


class Item(BaseModel):
    """An item of a report."""

    name: str


@APP.task(name="reports.export", bind=True, shared=False)  # type: ignore[untyped-decorator]  # celery carries no types
def export(self: Any, year: int, items: list[Item] | None = None) -> str:
    """Export a year's orders.

    Args:
        self: The task.
        year: Four digits.
        items: What to export.
    """
    return f"{self} {year} {items}"


def test_a_task_describes_its_own_tool() -> None:
    """The tool's name, description and parameters come from the Celery task. Its parameter `self` is left out."""
    tool = celery_tool("reports.export", parameters=export)
    assert (tool.name, tool.description, tool.timeout_s) == ("reports_export", "Export a year's orders.", 3600)
    assert set(tool.parameters["properties"]) == {"year", "items"}
    assert tool.parameters["properties"]["year"]["description"] == "Four digits."
    assert tool.parse('{"year": 2025}') == {"year": 2025}, "no default is sent, and no value is converted"
    with pytest.raises(ToolError, match="year"):
        tool.parse('{"year": "last"}')


def test_a_list_refers_to_its_definitions_from_the_root() -> None:
    """With `max_parallel`, the schema has its `$defs` at the root, to which references such as `#/$defs/…` point."""
    parameters = celery_tool("reports.export", parameters=export, max_parallel=3).parameters
    assert set(parameters["$defs"]) == {"Item"}
    assert "$defs" not in parameters["properties"]["calls"]["items"]


def test_a_schema_is_checked_by_its_names() -> None:
    """If a schema is given, perdure checks only the names of the arguments. The task checks the values."""
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    tool = celery_tool("reports.export", parameters=schema, description="Exports.")
    assert tool.parse('{"a": [1]}') == {"a": [1]}
    for arguments in ("{}", '{"a": 1, "b": 2}', "[]", "{", '{"a": NaN}'):
        with pytest.raises(ToolError, match="refused"):
            tool.parse(arguments)
    assert celery_tool("reports.export").parse('{"anything": 1}') == {"anything": 1}


@pytest.mark.parametrize(
    "given",
    [
        {"task": ""}, {"task": "a b"}, {"task": "x" * 201}, {"name": "a.b"}, {"effect": "safe"}, {"timeout_s": 0},
        {"timeout_s": float("inf")}, {"timeout_s": float("nan")}, {"queue": ""}, {"queue": "a b"},
        {"max_parallel": 0}, {"max_result_chars": 0}, {"requires_approval": "yes"}, {"parameters": {"type": "array"}},
        {"parameters": {"type": "object", "x": object()}}, {"parameters": 7},
    ],
    ids=lambda given: "-".join(f"{name}={value}"[:40].split(" at ")[0] for name, value in given.items()),
)  # fmt: skip
def test_a_wrong_declaration_is_refused(given: dict[str, Any]) -> None:
    """An invalid declaration raises `SettingsError`."""
    with pytest.raises(SettingsError):
        celery_tool(**{"task": "reports.export", **given})


def test_two_tools_of_one_name_are_refused() -> None:
    """Two Celery tasks are refused if their tools would have the same name."""
    with pytest.raises(SettingsError, match="two tools with the same name"):
        Agent("assistant", "You help.", [celery_tool("a.b"), celery_tool("a_b")])


def test_awaited_tools_cannot_be_called_as_functions() -> None:
    """`celery_tool` and `sleep_until` cannot be called as functions, because the engine must park the turn."""
    context = ToolContext("ana", UUID(int=1), UUID(int=2), UUID(int=3), "test", None)  # type: ignore[arg-type]  # unused
    for tool in (celery_tool("a.b"), SleepUntil()):
        with pytest.raises(ToolError):
            tool.call({}, context)


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        ("2026-03-01T13:00:00+00:00", 3_600),
        ("2026-03-01T14:00:00", 3_600),  # Paris time
        ("2026-03-02", 39_600),
        (" 2026-03-01T12:00:01Z ", 1),
    ],
)
def test_a_moment_without_an_offset_is_in_the_given_zone(moment: str, seconds: float) -> None:
    """A time without an offset is read in the given zone. A time with an offset keeps that offset."""
    assert SleepUntil().wait_s({"moment": moment}, NOW, ZoneInfo("Europe/Paris")) == seconds


def test_the_longest_wait_is_the_authors() -> None:
    """The tool's author sets the longest wait. A time that needs a longer wait is refused."""
    tool = SleepUntil(longest=timedelta(hours=2))
    assert "2 hours" in tool.description
    assert tool.wait_s({"moment": "2026-03-01T14:00Z"}, NOW, UTC) == 7_200
    with pytest.raises(ToolError, match="more than 2 hours ahead"):
        tool.wait_s({"moment": "2026-03-01T14:01Z"}, NOW, UTC)
    for longest in (timedelta(), timedelta(days=10_000)):
        with pytest.raises(SettingsError):
            SleepUntil(longest=longest)


@pytest.mark.parametrize("arguments", ["{}", '{"moment": 7}', '{"moment": "x", "zone": "y"}', "[]", "{"])
def test_other_arguments_than_a_moment_are_refused(arguments: str) -> None:
    """Arguments other than one string `moment` are refused. The error message names `moment`."""
    with pytest.raises(ToolError, match="moment"):
        SleepUntil().parse(arguments)


_ODD: dict[str, Any] = {
    "type": "object",
    "properties": {"$filter": {"type": "string"}, "by": {"type": "object", "properties": {"größe": {}}}},
    "required": ["$filter"],
    "additionalProperties": False,
}
_WRITTEN = {"_filter": "new", "by": {"gr__e": 1}}
_OWN = {"$filter": "new", "by": {"größe": 1}}


def test_keys_that_providers_refuse_are_translated() -> None:
    """Models read and write other keys; whoever runs the call gets the schema's own."""
    made = external_tool("find", "Find.", _ODD)
    assert (made.parameters, made.has_odd_keys) == (_ODD, True)
    assert set(made.schema().parameters["properties"]) == {"_filter", "by"}
    assert made.parse(json.dumps(_WRITTEN)) == made.parse(json.dumps(_OWN)) == _OWN
    with pytest.raises(ToolError, match=r"\$filter is missing.*_filter"):
        made.parse('{"by": {}}')
    plain = external_tool("find", "Find.", {"type": "object", "properties": {"a": {}}})
    assert not plain.has_odd_keys


def test_a_client_and_a_task_get_the_own_keys() -> None:
    """Also each of the tasks of one call."""
    got: list[Any] = []

    def run(**given: Any) -> str:
        got.append(given)
        return "found"

    tools: list[Any] = [
        external_tool("find", "Find.", _ODD),
        celery_tool("shop.find", parameters=_ODD),
        celery_tool("shop.find", name="find_all", parameters=_ODD, max_parallel=2),
    ]
    agent = Agent("finder", "You find.", tools=tools)
    calls = [
        call("find", json.dumps(_WRITTEN)),
        call("shop_find", json.dumps(_WRITTEN)),
        call("find_all", json.dumps({"calls": [_WRITTEN, _OWN]})),
    ]
    answer = ask(agent, "Find!", model=Scripted(calls, "Found."), tasks={"find": run, "shop.find": run})
    assert [each.status for each in answer.calls] == ["done"] * 3, answer.calls
    assert got == [_OWN] * 4


def test_what_a_client_declares_is_stored_as_it_is() -> None:
    """A worker that reads the turn again translates the same keys."""
    stored = Additions(tools=(client_tool("find", "Find.", _ODD),)).to_dict()
    [again] = Additions.from_dict(stored).tools
    assert again.parse(json.dumps(_WRITTEN)) == _OWN
