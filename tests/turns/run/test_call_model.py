"""What a turn sends to its model beside the messages: the tools that fit, and the settings of the call."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.database.fencing import Fence
from perdure.errors import ContextTooLong
from perdure.models.windows import LearnedWindows
from perdure.settings import Settings
from perdure.tools.registry import Tool
from perdure.turns.prompt.tools import DEFAULT_WINDOW, budget, offered, window
from perdure.turns.reading import read_turn
from perdure.turns.run.call_model import size_of_request
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


@pytest.mark.long
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
    assert budget(settings, window(settings, Agent("a", "You help."))) == tokens


def test_an_agents_own_model_has_its_own_window() -> None:
    """The window is that of the agent's model."""
    settings = Settings()
    assert budget(settings, window(settings, Agent("a", "You help.", model="anthropic:claude-sonnet-4-5"))) == 50_000


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


# --- learned windows


def test_a_refused_size_is_kept_for_the_model(harness: Harness) -> None:
    """After a smaller prompt was accepted, the later prompts of all workers are smaller from the beginning."""
    for number in range(8):
        harness.ask(f"message {number} " + "x" * 2_000)
    harness.script(ContextTooLong("Too long."), says("fits"))
    assert harness.ask("and now?")["status"] == "done"
    refused, accepted = harness.model.requests[-2:]
    [row] = harness.sql("SELECT model, tokens FROM model_windows")
    assert (row.model, row.tokens) == ("offline", size_of_request(refused))
    accepted_tokens = size_of_request(accepted)
    assert accepted_tokens is not None
    assert accepted_tokens < row.tokens
    harness.windows = LearnedWindows(harness.database, harness.clock)  # of another worker
    harness.ask("and then?")
    assert len(harness.model.requests) == 8 + 2 + 1
    tokens = size_of_request(harness.model.requests[-1])
    assert tokens is not None
    assert tokens < row.tokens


def test_a_learned_window_expires_and_only_shrinks(harness: Harness) -> None:
    """A server may be started again with a larger window. A worker that has not read the table writes no larger one."""
    one, other = (LearnedWindows(harness.database, harness.clock) for _ in range(2))
    assert one.of("m") is None
    other.learn("m", 4_000)
    assert one.of("m") is None, "read a moment ago"
    one.learn("m", 9_000)
    harness.move(61)
    assert (one.of("m"), other.of("m")) == (4_000, 4_000)
    one.learn("m", 900)
    harness.move(8 * 86_400)
    assert one.of("m") is None
    one.learn("m", 9_000)
    assert one.of("m") == 9_000


def test_a_wrong_refusal_is_forgotten_when_the_model_accepts_as_much(harness: Harness) -> None:
    """Instructions and messages keep their size, so the next long prompt shows that the refusal was wrong."""
    harness.ask("x" * 6_000)
    harness.script(ContextTooLong("Wrong."), says("fits"))
    harness.ask("and now?")
    assert len(harness.sql("SELECT * FROM model_windows")) == 1
    harness.ask("short", user_id="ben")
    assert len(harness.sql("SELECT * FROM model_windows")) == 1
    harness.ask("y" * 9_000, user_id="ben")
    assert harness.sql("SELECT * FROM model_windows") == []
    assert harness.windows.of("offline") is None


def test_a_refusal_without_a_smaller_prompt_teaches_nothing(harness: Harness) -> None:
    """A model that refuses every prompt has another fault."""
    harness.ask("x" * 6_000)
    harness.script(*[ContextTooLong("Too long.")] * 3)
    assert harness.ask("hello")["status"] == "failed"
    assert harness.sql("SELECT * FROM model_windows") == []


def test_old_results_of_a_turn_are_cut_before_the_newest(harness: Harness) -> None:
    """A turn whose results exceed the budget shows its newest round whole, and the beginning of the others."""

    @tool(effect="pure")
    def read(page: int) -> str:
        """Read a page."""
        return f"page {page} " + "x" * 3_000

    harness.equip(read, window=6_000)
    harness.script(*[calls(("read", {"page": page})) for page in range(4)], says("done"))
    assert harness.ask("read")["status"] == "done"
    results = [each.content for each in harness.model.requests[-1].messages if each.role == "tool"]
    assert [each[:6] for each in results] == [f"page {page}" for page in range(4)]
    assert [len(each) > 3_000 for each in results] == [False, False, False, True]
