"""What a turn sends to its model beside the messages: the tools that fit, and the settings of the call."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.database.fencing import Fence
from perdure.settings import Settings
from perdure.tools.registry import Tool
from perdure.turns.prompt.tools import DEFAULT_WINDOW, budget, offered
from perdure.turns.reading import read_turn
from perdure.turns.run.queries import LEAVE_OUT_TOOLS
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def numbered(number: int) -> Tool:
    """A tool with a description of about 200 tokens. Its number in words is in its description only."""

    def function(value: int) -> str:
        return f"{number}: {value}"

    function.__doc__ = f"Do thing {WORDS[number]}. {'x' * 600}"
    return tool(effect="pure", name=f"tool_{number}")(function)


@pytest.fixture
def full(harness: Harness) -> Harness:
    """A harness whose agent has ten tools. About seven of them fit the budget."""
    harness.settings = harness.settings.model_copy(
        update={"memory": harness.settings.memory.model_copy(update={"budget_tools": 1_800})}
    )
    harness.equip(*map(numbered, range(10)))
    return harness


def sent(harness: Harness) -> list[list[str]]:
    """The names of the tools of each request to the model."""
    return [[each.name for each in request.tools] for request in harness.model.requests]


def test_forty_tools_fit_a_usual_window(harness: Harness) -> None:
    """Without a budget, tools have a share of the window: forty usual tools reach the model."""
    harness.equip(*(tool(effect="pure", name=f"tool_{number}")(lookup) for number in range(40)))
    turn = harness.ask()
    assert len(sent(harness)[0]) == 40
    assert "tools_left_out" not in turn


def lookup(query: str, limit: int = 10, *, archived: bool = False) -> str:
    """Look up records by a query, newest first, and return them as JSON.

    Args:
        query: Words that the records contain, combined with AND.
        limit: The most records.
        archived: Whether archived records are included.
    """
    return f"{query} {limit} {archived}"


def test_tools_that_do_not_fit_are_found_by_a_search(full: Harness) -> None:
    """The model gets the first tools and `search_tools`. What it finds is in its next prompt, and can be called."""
    full.script(calls(("search_tools", {"query": "thing nine"})), calls(("tool_9", {"value": 5})), says("done"))
    turn = full.ask()
    first, second, third = sent(full)
    assert first[-1] == "search_tools"
    assert first[:-1] == [f"tool_{number}" for number in range(len(first) - 1)]
    assert 1 <= len(first) - 1 < 9
    assert "tool_9" not in first
    assert "tool_9" in second
    assert "tool_9" in third
    assert full.messages(full.sql("SELECT session_id FROM turns")[0].session_id)[4]["content"] == "9: 5"
    assert turn["tools_left_out"] == [f"tool_{number}" for number in range(10) if f"tool_{number}" not in third]


def test_what_a_search_found_survives_a_crash(full: Harness) -> None:
    """Another process finds the same tools, because they follow from the transcript."""
    full.script(calls(("search_tools", {"query": "thing nine"})), says("never"))
    accepted = full.send()
    with full.crashing("after", "turns.step", nth=2):
        full.run(accepted.session_id)
    full.move(1_000)
    full.script(calls(("tool_9", {"value": 5})), says("done"))
    full.run(accepted.session_id)
    assert "tool_9" not in sent(full)[0]
    assert "tool_9" in sent(full)[1]
    assert read_turn(full.database, accepted.turn_id)["status"] == "done"


def test_a_search_that_a_crash_interrupted_runs_again(full: Harness) -> None:
    """The search is pure: a worker that resumes the turn finishes it without asking the model again."""
    full.script(calls(("search_tools", {"query": "thing nine"})))
    accepted = full.send()
    with full.crashing("after", "turns.step"):
        full.run(accepted.session_id)
    full.move(1_000)
    full.run(accepted.session_id)
    assert full.turn(accepted.turn_id)["status"] == "done"
    assert len(sent(full)) == 2
    assert "tool_9" in sent(full)[1]


def test_a_later_turn_begins_with_the_first_tools(full: Harness) -> None:
    """What a turn has found is not in the prompts of the next one."""
    full.script(calls(("search_tools", {"query": "thing nine"})), says("done"))
    full.ask()
    full.ask()
    assert sent(full)[2] == sent(full)[0]


def test_the_tools_that_are_left_out_are_logged_once(full: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A process logs the names once for each agent, not for each turn."""
    runtime = full.runtime
    with caplog.at_level(logging.WARNING):
        full.run_with(runtime, "one")
        full.run_with(runtime, "two")
    (record,) = [each for each in caplog.records if "do not fit" in each.getMessage()]
    assert "agent assistant: " in record.getMessage()
    assert "tool_9" in record.getMessage()


def test_a_worker_that_lost_the_session_reports_nothing(full: Harness) -> None:
    """The names are stored under the fence, like all writes of a turn."""
    accepted = full.send()
    turn_id, held = accepted.turn_id, full.claimed(accepted.session_id)
    lost = full.tenure_of(turn_id, Fence(held.token + 1, held.fence.nonce))
    for tenure, names in ((held, '["a"]'), (lost, '["b"]')):
        full.database.run(LEAVE_OUT_TOOLS, {**tenure.fenced, "turn_id": turn_id, "names": names})
    assert full.turn(turn_id)["tools_left_out"] == ["a"]


@pytest.mark.parametrize("most", [0, 10, 100])
def test_a_budget_below_the_search_itself_leaves_it_out(most: int) -> None:
    """If not even `search_tools` fits, the budget still holds."""
    prompt = offered(Agent("a", "You help.", [numbered(1)]).toolset(None), most)
    assert (prompt.sent, prompt.left_out) == ((), ("tool_1",))


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, DEFAULT_WINDOW // 4),
        ({"model_window": 2_048}, 512),
        ({"model": "openai:gpt-5"}, 100_000),
        ({"model": "openai:gpt-5", "model_window": 2_048}, 100_000),
        ({"model_window": 2_048, "memory": {"budget_tools": 4_000}}, 4_000),
        ({"memory": {"budget_tools": 0}}, 0),
    ],
)
def test_the_budget_is_a_share_of_the_window(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], tokens: int
) -> None:
    """A budget that is set explicitly comes first, then a known window, then `PERDURE_MODEL_WINDOW`."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    settings = Settings.model_validate(given)
    assert budget(settings, Agent("a", "You help.")) == tokens


def test_an_agents_own_model_has_its_own_window() -> None:
    """The window is that of the agent's model."""
    assert budget(Settings(), Agent("a", "You help.", model="anthropic:claude-sonnet-4-5")) == 50_000


# --- settings


def test_an_agents_settings_come_before_the_defaults(harness: Harness) -> None:
    """Each request has the settings of the agent, and the defaults that the agent does not replace."""
    harness.settings = harness.settings.model_copy(update={"model_settings": {"temperature": 0.2, "seed": 1}})
    harness.equip(settings={"temperature": 1, "top_p": 0.5})
    harness.ask()
    assert harness.model.requests[0].settings == {"temperature": 1, "top_p": 0.5, "seed": 1}


def test_a_required_call_is_required_until_there_are_results(harness: Harness) -> None:
    """`tool_choice="required"` holds for the first round of each turn, so that the turn can end."""
    harness.equip(numbered(1), settings={"tool_choice": "required"})
    harness.script(calls(("tool_1", {"value": 1})), says("done"), calls(("tool_1", {"value": 2})), says("done"))
    harness.ask()
    harness.ask()
    assert [each.settings.get("tool_choice") for each in harness.model.requests] == ["required", None] * 2


@pytest.mark.parametrize(("chosen", "sent"), [(["gone", "tool_1"], ["tool_1"]), (["gone"], None)])
def test_a_tool_that_the_agent_lacks_is_not_required(harness: Harness, chosen: Any, sent: Any) -> None:
    """Providers refuse to require a tool that the prompt does not define, such as one that an MCP server removed."""
    harness.equip(numbered(1), settings={"tool_choice": chosen})
    harness.ask()
    assert harness.model.requests[0].settings.get("tool_choice") == sent


def test_without_tools_no_call_is_required(harness: Harness) -> None:
    """A prompt without tools has no settings about tools, which providers refuse."""
    harness.agents = Agents([Agent("assistant", "You help.", settings={"tool_choice": "required", "seed": 1})])
    harness.ask()
    assert harness.model.requests[0].settings == {"seed": 1}
