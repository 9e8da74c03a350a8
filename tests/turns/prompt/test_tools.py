"""A prompt has at most as many tools as providers accept."""

from __future__ import annotations

from perdure import Agent, tool
from perdure.models.protocol import Message, Role, ToolCall
from perdure.tools.registry import Tool
from perdure.tools.sources import Toolset
from perdure.turns.prompt.tools import MOST_TOOLS, Offered, offered

BUDGET = 1_000_000


def numbered(number: int) -> Tool:
    @tool(effect="pure", name=f"tool_{number}")
    def made(value: int) -> int:
        """Do something."""
        return value

    return made


def equipped(count: int) -> Toolset:
    return Agent("a", "You help.", [numbered(number) for number in range(count)]).toolset(None)


def names(prompt: Offered) -> list[str]:
    return [each.name for each in prompt.sent]


def searches(*numbers: int) -> list[Message]:
    """Messages that search for these tools, each in a search of its own."""
    calls = [ToolCall(str(number), "search_tools", f'{{"query": "{number}"}}') for number in numbers]
    return [Message(Role.ASSISTANT, "", (call,)) for call in calls]


def test_as_many_tools_as_providers_accept_are_all_sent() -> None:
    """With the tool of an agent's output, which a model adds, they are 128."""
    prompt = offered(equipped(MOST_TOOLS), BUDGET)
    assert names(prompt) == [f"tool_{number}" for number in range(MOST_TOOLS)]
    assert prompt.left_out == ()
    assert MOST_TOOLS + 1 == 128


def test_more_tools_than_providers_accept_are_found_by_a_search() -> None:
    """OpenAI refuses a prompt with more. The first tools are sent, with `search_tools`."""
    prompt = offered(equipped(140), BUDGET)
    assert names(prompt) == [*(f"tool_{number}" for number in range(MOST_TOOLS - 1)), "search_tools"]
    assert prompt.left_out == tuple(f"tool_{number}" for number in range(MOST_TOOLS - 1, 140))


def test_what_a_search_found_takes_the_place_of_others() -> None:
    """The first tools give way to it."""
    prompt = offered(equipped(140), BUDGET, searches(139))
    assert names(prompt) == [*(f"tool_{number}" for number in range(MOST_TOOLS - 2)), "search_tools", "tool_139"]


def test_many_searches_find_no_more_than_fits() -> None:
    """The newest searches come first."""
    prompt = offered(equipped(300), BUDGET, searches(*range(300)))
    assert len(prompt.sent) == MOST_TOOLS
    assert names(prompt)[:2] == ["search_tools", "tool_299"]


def test_without_the_search_the_first_tools_are_sent() -> None:
    """An agent's own tool of that name replaces the built-in one."""

    @tool(effect="pure")
    def search_tools() -> str:
        """Search in a shed."""
        return "a hammer"

    tools = Agent("a", "You help.", [*map(numbered, range(140)), search_tools]).toolset(None)
    assert names(offered(tools, BUDGET)) == [f"tool_{number}" for number in range(MOST_TOOLS)]
