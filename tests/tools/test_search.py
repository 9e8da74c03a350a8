"""`search_tools` finds an agent's tools by the words of their names and descriptions."""

from __future__ import annotations

import json
import threading
from uuid import UUID

import pytest

from perdure import Agent, ToolContext, tool
from perdure.models.protocol import Message, Role, ToolCall, ToolSchema
from perdure.tools import search
from perdure.tools.registry import Effect, Tool

TOOLS = [
    ToolSchema(name, description, {"type": "object"})
    for name, description in [
        ("github:create_issue", "Open an issue in a repository."),
        ("github:list_issues", "List the issues of a repository."),
        ("github:merge", "Merge a pull request of a repository."),
        ("weather", "Say what the weather is like in a city."),
        ("wetter", "Sage das Wetter einer Stadt voraus, auch für Zürich."),
        *((f"plain_{number}", "Do something in a repository.") for number in range(20)),
    ]
]


def context() -> ToolContext:
    """The context of a call."""
    return ToolContext("ana", UUID(int=1), UUID(int=2), UUID(int=3), "http", threading.Event())


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("create an issue", "github:create_issue"),
        ("Issues", "github:list_issues"),
        ("merge", "github:merge"),
        ("what is the weather in Paris?", "weather"),
        ("ZÜRICH", "wetter"),
        ("plain_7", "plain_7"),
    ],
)
def test_the_best_match_comes_first(query: str, first: str) -> None:
    """Rare words and words of the name count for more; case and endings do not matter."""
    found = search.find(query, TOOLS)
    assert found[0].name == first
    assert len(found) <= search.MOST_FOUND


@pytest.mark.parametrize("query", ["", "?!", "quantum", "x" * 100_000])
def test_nothing_may_match(query: str) -> None:
    """A query without a known word finds nothing. The model then reads the names of all tools."""
    assert search.find(query, TOOLS) == []
    text = search.over(lambda: TOOLS).call({"query": query}, context())
    assert text.startswith("No tool matches.")
    assert "github:create_issue" in text


def test_the_result_describes_what_was_found() -> None:
    """The model reads the name and the description of each tool."""
    found = json.loads(search.over(lambda: TOOLS).call({"query": "weather"}, context()))
    assert found == [{"name": "weather", "description": "Say what the weather is like in a city."}]


def test_the_tools_of_a_turn_follow_from_its_messages() -> None:
    """The newest search comes first. Refused arguments and other tools' calls find nothing."""
    searches = [
        Message(Role.USER, "weather"),
        Message(Role.ASSISTANT, "", (ToolCall("1", "search_tools", '{"query": "weather"}'),)),
        Message(Role.TOOL, "…", tool_call_id="1"),
        Message(Role.ASSISTANT, "", (ToolCall("2", "search_tools", '{"querry": "merge"}'), ToolCall("3", "x", "{}"))),
        Message(Role.ASSISTANT, "", (ToolCall("4", "search_tools", '{"query": "create"}'),)),
    ]
    assert [each.name for each in search.found_in(searches, TOOLS)] == ["github:create_issue", "weather"]


def test_each_agent_has_the_tool_but_does_not_list_it() -> None:
    """The tool is pure, and is neither in the names nor in the schemas. An agent's own tool of this name wins."""

    @tool(effect="pure")
    def search_tools() -> str:
        """Search in a shed."""
        return "a hammer"

    tools = Agent("a", "You help.").toolset(None)
    found = tools.find("search_tools")
    assert isinstance(found, Tool)
    assert found.effect is Effect.PURE
    assert (tools.names, tools.schemas()) == ((), ())
    own = Agent("a", "You help.", [search_tools]).toolset(None)
    assert own.find("search_tools") is search_tools
    assert own.search is None
