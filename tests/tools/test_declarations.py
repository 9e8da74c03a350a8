"""A wrong value in an author's declaration is refused where it is written, not by a worker in the middle of a turn."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import perdure
from perdure import (
    Agent,
    ErrorTexts,
    McpServer,
    agent_tool,
    ask_user,
    celery_tool,
    external_tool,
    handoff,
    required,
    sleep_until,
    tool,
)
from perdure.agents import Agents
from perdure.errors import SettingsError


class Model:
    """A model object, whose text has a secret."""

    def __repr__(self) -> str:
        return "Model(api_key='s3cret')"


@tool(effect="pure")
def weather(city: str) -> str:
    """Say what the weather is like."""
    return city


def plain(city: str) -> str:
    """Say what the weather is like."""
    return city


def prompt(turn: object) -> str:
    """Instructions as a function."""
    return str(turn)


def generating(turn: object) -> Iterator[object]:
    """A generator, of which a call runs nothing."""
    yield turn


def without_parameters() -> None:
    """A hook that cannot be called."""


_EXPORT = Celery("shop", set_as_current=False).task(name="shop.export", shared=False)(plain)

AGENT: list[tuple[str, object, str]] = [
    ("name", "", "text of 1 to 200 characters"),
    ("name", "   ", "text of 1 to 200 characters"),
    ("name", 5, "text of 1 to 200 characters"),
    ("name", None, "text of 1 to 200 characters"),
    ("name", "x" * 201, "text of 1 to 200 characters"),
    ("name", "a\x00", "text of 1 to 200 characters"),
    ("instructions", lambda: "x", "a function of the turn"),
    ("max_tokens", 0, "a whole number from 1"),
    ("max_cost", "0.05", "a number of US dollars"),
    ("max_cost", float("nan"), "a number of US dollars"),
    ("window", 1.5, "a whole number from 1"),
    ("keep_turns", True, "a whole number from 1"),
    ("deps", "Shop", "a function of the turn"),
    ("deps", without_parameters, "a function of the turn"),
    ("output", prompt, "a type"),
    ("check_output", without_parameters, "a function of the answer"),
    ("instructions", None, "text"),
    ("instructions", b"You help.", "text"),
    ("instructions", Path("prompt.md"), "text"),
    ("instructions", ["You help."], "text"),
    ("instructions", "a\udcff", "text"),
    ("model", Model(), "'openai:gpt-5'"),
    ("model", Model, "'openai:gpt-5'"),
    ("model", "", "'openai:gpt-5'"),
    ("model", ["openai:gpt-5"], "'openai:gpt-5'"),
    ("max_steps", "5", "a whole number from 1 to 2147483647, or None"),
    ("max_steps", 0, "a whole number from 1 to 2147483647, or None"),
    ("max_steps", -3, "a whole number from 1 to 2147483647, or None"),
    ("max_steps", 2.5, "a whole number from 1 to 2147483647, or None"),
    ("max_steps", 10**12, "a whole number from 1 to 2147483647, or None"),
    ("timeout_s", 1e300, "a number of seconds above 0, at most a year, or None"),
    ("name", "a\nb", "1 to"),
    ("max_steps", True, "a whole number from 1 to 2147483647, or None"),
    ("timeout_s", "5", "a number of seconds above 0, at most a year, or None"),
    ("timeout_s", 0, "a number of seconds above 0, at most a year, or None"),
    ("timeout_s", -1.5, "a number of seconds above 0, at most a year, or None"),
    ("timeout_s", math.nan, "a number of seconds above 0, at most a year, or None"),
    ("timeout_s", math.inf, "a number of seconds above 0, at most a year, or None"),
    ("timeout_s", True, "a number of seconds above 0, at most a year, or None"),
    ("timeout_s", timedelta(seconds=5), "a number of seconds above 0, at most a year, or None"),
    ("on_unavailable", "wait", "fail, park, or None"),
    ("on_unavailable", True, "fail, park, or None"),
    ("error_messages", {"TIMEOUT": "Late."}, "ErrorTexts({code: text})"),
    ("error_messages", ErrorTexts, "ErrorTexts({code: text})"),
    ("error_messages", "Sorry.", "ErrorTexts({code: text})"),
    ("casebank", True, "or None for no bank"),
    ("casebank", "", "or None for no bank"),
    ("tools", weather, "a list of tools"),
    ("tools", "weather", "a list of tools"),
    ("tools", None, "a list of tools"),
    ("tools", {weather}, "a list of tools"),
    ("tools", (each for each in [weather]), "a list of tools"),
    *[
        (point, hooks, "a list of functions with one parameter")
        for point in ("before_turn", "after_turn", "before_tool", "after_tool")
        for hooks in (prompt, "", None, [5], [without_parameters], [generating], required(prompt))
    ],
]


@pytest.mark.parametrize(("argument", "value", "accepted"), AGENT)
def test_each_argument_of_an_agent_is_checked(argument: str, value: Any, accepted: str) -> None:
    """The error names the argument and what is accepted, and shows the value, unless the value may be a secret."""
    arguments: dict[str, Any] = {"name": "shop", "instructions": "You help.", argument: value}
    with pytest.raises(SettingsError) as raised:
        Agent(**arguments)
    assert f"{argument}=" in str(raised.value)
    assert f"accepted: {accepted}" in str(raised.value) or accepted in str(raised.value).partition("accepted")[2]
    assert "s3cret" not in str(raised.value)
    assert " at 0x" not in str(raised.value)
    assert argument == "name" or "agent 'shop'" in str(raised.value)


@pytest.mark.parametrize("given", [5, "weather", None, Model(), Model, Agent("a", "b"), {"name": "weather"}])
def test_what_is_no_tool_is_refused(given: Any) -> None:
    """An agent's tools are tools or functions; the error lists what an author may write."""
    with pytest.raises(SettingsError, match=r"agent 'shop' has .* among its tools; accepted: functions with @tool"):
        Agent("shop", "You help.", tools=[weather, given])


def test_a_celery_task_among_the_tools_is_explained() -> None:
    """A Celery task looks like a function. The error says how to make a tool of it."""
    with pytest.raises(SettingsError, match=r"write celery_tool\('shop.export'\)"):
        Agent("shop", "You help.", tools=[_EXPORT])


@pytest.mark.parametrize("maker", [ask_user, celery_tool, external_tool, agent_tool, handoff, tool])
def test_what_makes_a_tool_is_none_itself(maker: Callable[..., object]) -> None:
    """As `ask_user` without its parentheses next to `sleep_until`, which needs none: a model would call the maker."""
    with pytest.raises(SettingsError, match=rf"{maker.__name__} makes a tool: write {maker.__name__}\(…\)"):
        Agent("shop", "You help.", tools=[weather, sleep_until, maker])


def test_tools_of_one_name_are_refused() -> None:
    """Two tools of one name would make every prompt invalid."""
    with pytest.raises(SettingsError, match="two tools with the same name"):
        Agent("shop", "You help.", tools=[weather, tool(name="weather")(plain)])
    with pytest.raises(SettingsError, match="two MCP servers with the same name"):
        Agent("shop", "You help.", tools=[McpServer("s", command=["x"]), McpServer("s", url="http://h/mcp")])


def test_what_an_author_usually_writes_is_accepted() -> None:
    """Lists and tuples of tools, plain functions, methods, whole and fractional seconds, and hooks of every kind."""

    class Guard:
        def __call__(self, turn: object, strict: bool = True) -> None:
            """Do nothing."""

        async def later(self, turn: object) -> None:
            """Do nothing."""

    hooks: Any = (Guard(), Guard().later, required(Guard().later), print)
    made = Agent(
        "Mein Agent",
        "",
        [plain, celery_tool("shop.export")],
        timeout_s=5,
        max_steps=1,
        before_turn=hooks,
        after_tool=[],
    )
    assert [each.name for each in made.tool_list] == ["plain", "shop_export"]
    assert Agent("a", "b", timeout_s=0.5, error_messages=ErrorTexts({}), casebank=None).bank is None


TOOL: list[tuple[dict[str, Any], str]] = [
    ({"name": 5}, "is named 5"),
    ({"name": ""}, "is named ''"),
    ({"timeout_s": "5"}, "has timeout_s='5'; accepted: a number of seconds above 0"),
    ({"timeout_s": -1}, "has timeout_s=-1"),
    ({"timeout_s": True}, "has timeout_s=True"),
    ({"max_result_chars": "many"}, "has max_result_chars='many'; accepted: a whole number from 1 to 2147483647"),
    ({"max_result_chars": 0}, "has max_result_chars=0"),
    ({"probe": "look"}, "has probe='look'; accepted: a function with one parameter"),
    ({"probe": without_parameters}, "has probe=the function without_parameters"),
    ({"breaker": 5}, "has breaker=5"),
    ({"effect": ["pure"]}, "declares the effect ['pure']"),
    ({"requires_approval": "yes"}, "has requires_approval='yes'"),
]


@pytest.mark.parametrize(("wrong", "message"), TOOL)
def test_each_argument_of_a_tool_is_checked(wrong: dict[str, Any], message: str) -> None:
    """The error names the function, the argument, the value and what is accepted."""
    with pytest.raises(SettingsError) as raised:
        tool(**wrong)(plain)
    assert f"tests.tools.test_declarations.plain {message}" in str(raised.value)


def test_the_name_of_a_tool_is_no_argument_of_the_decorator() -> None:
    """`@tool("name")` is a frequent mistake."""
    make: Any = tool
    with pytest.raises(SettingsError, match="the tool 'weather' is not a function"):
        make("weather")


P: Any = perdure
_MCP: dict[str, Any] = {"command": ["x"]}


def nested(levels: int) -> dict[str, Any]:
    """A JSON schema of objects within objects."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"inner": schema}}
    return schema


OTHERS: list[tuple[Callable[[], object], str]] = [
    (lambda: P.celery_tool(_EXPORT), "has the task an object"),
    (lambda: P.celery_tool(None), "has the task None"),
    (lambda: P.celery_tool("a.b", timeout_s="9"), "has timeout_s='9'; accepted: a number of"),
    (lambda: P.celery_tool("a.b", timeout_s=None), "has timeout_s=None"),
    (lambda: P.celery_tool("a.b", max_parallel="2"), "has max_parallel='2'"),
    (lambda: P.celery_tool("a.b", max_parallel=-2), "has max_parallel=-2"),
    (lambda: P.celery_tool("a.b", max_result_chars=None), "has max_result_chars=None"),
    (lambda: P.celery_tool("a.b", name=7), "has name=7"),
    (lambda: P.celery_tool("a.b", queue=7), "has queue=7"),
    (lambda: P.celery_tool("a.b", description=7), "has description=7"),
    (lambda: P.celery_tool("a.b", description=" "), "has description=' '"),
    (lambda: P.celery_tool("a.b", parameters=7), "has parameters=7; accepted: a JSON schema"),
    (lambda: P.celery_tool("a.b", parameters=nested(900)), "has parameters that cannot be sent to a model: "),
    (lambda: P.celery_tool("a.b", parameters=nested(40)), "nested more than 64 levels deep"),
    (lambda: P.SleepUntil(longest=60), "sleep_until has longest=60"),
    (lambda: P.SleepUntil(name=""), "sleep_until has name=''"),
    (lambda: P.McpServer(5, **_MCP), "is named 5"),
    (lambda: P.McpServer("s", command=5), "has command=5; accepted: a list of strings"),
    (lambda: P.McpServer("s", command=["x", 5]), "has command=['x', 5]"),
    (lambda: P.McpServer("s", url=5), "has url=5; accepted: an address"),
    (lambda: P.McpServer("s", env={"A": 1}, **_MCP), "has env that are not text by name"),
    (lambda: P.McpServer("s", headers=["A: 1"], **_MCP), "has headers that are not text by name"),
    (lambda: P.McpServer("s", cwd=5, **_MCP), "has cwd=5"),
    (lambda: P.McpServer("s", effects=["pure"], **_MCP), "has effects=['pure']"),
    (lambda: P.McpServer("s", probes={"pay": 5}, **_MCP), "has probes={'pay': 5}"),
    (lambda: P.McpServer("s", trust_hints="no", **_MCP), "has trust_hints='no'"),
    (lambda: P.McpServer("s", timeout_s="5", **_MCP), "has timeout_s='5'"),
    (lambda: P.McpServer("s", connect_timeout_s=None, **_MCP), "has connect_timeout_s=None"),
    (lambda: P.McpServer("s", max_result_chars="5", **_MCP), "has max_result_chars='5'"),
    (lambda: P.required(5), "required() has function=5"),
    (lambda: P.guard(parallel="no"), "guard() has parallel='no'; accepted: True or False"),
    (lambda: P.guard(required=None), "guard() has required=None; accepted: True or False"),
    (lambda: P.required(without_parameters), "has function=the function without_parameters"),
    (lambda: P.ErrorTexts(["Late."]), "ErrorTexts has by_code=['Late.']"),
    (lambda: P.ErrorTexts({"TIMEOUT": 5}), "ErrorTexts has by_code={'TIMEOUT': 5}"),
    (lambda: P.ErrorTexts({}, {"de": "Zu spät."}), "ErrorTexts has by_language"),
    (lambda: P.gateway(authenticate="ana"), "has authenticate='ana'"),
    (lambda: P.gateway(authenticate=without_parameters), "function with one parameter"),
    (lambda: P.install("shop"), "perdure.install() has app='shop'"),
]


@pytest.mark.parametrize(("declare", "message"), OTHERS, ids=[message for _, message in OTHERS])
def test_each_other_declaration_is_checked(declare: Callable[[], object], message: str) -> None:
    """What an author writes besides agents and tools is checked alike."""
    with pytest.raises(SettingsError) as raised:
        declare()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("path", "file", "hidden"), [("code", "code.py", "code.py"), ("json.shop", "json/shop.py", "json")]
)
def test_a_module_that_hides_the_authors_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, file: str, hidden: str
) -> None:
    """The working directory comes last in the path, so a module of Python has the name first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("from perdure import Agent\n\nassistant = Agent('assistant', 'You help.')\n")
    with pytest.raises(
        SettingsError, match=rf"PERDURE_AGENTS is '{path}'.*lib/python.* hides {tmp_path / hidden}: give"
    ):
        Agents.from_module(path)


def test_a_module_without_an_agent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another module of the same name may have been found. No file is hidden here."""
    (tmp_path / "idle_agents.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=rf"defines no Agent \(it is {tmp_path}/idle_agents\.py\)$"):
        Agents.from_module("idle_agents")


def test_a_module_that_leaves_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of agents that calls `sys.exit` stops no program silently."""
    (tmp_path / "leaving_agents.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(SettingsError, match=r"PERDURE_AGENTS is 'leaving_agents': SystemExit: 0 \(leaving_agents.py"):
        Agents.from_module("leaving_agents")
    assert "leaving_agents" not in sys.modules
