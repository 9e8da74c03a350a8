"""`agent_tool` and `handoff` are checked where they are written, and bring their agents into the installation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, adapt, agent_tool, handoff
from perdure.adapters.adopt import collect
from perdure.agents import Agents
from perdure.errors import SettingsError, ToolError
from perdure.testing import Conversation, Scripted, ask, call

SEARCHER = Agent("searcher", "You search.")


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"name": "two words"}, "1 to 64 of a-z"),
        ({"name": 7}, "1 to 64 of a-z"),
        ({"description": " "}, "text for the model"),
        ({"timeout_s": 0}, "seconds"),
        ({"max_result_chars": True}, "whole number"),
        ({"approver": "boss"}, "approver"),
    ],
)
def test_a_wrong_value_is_refused(given: dict[str, Any], accepted: str) -> None:
    """The error names the tool and what is accepted."""
    with pytest.raises(SettingsError, match=f"the agent_tool of 'searcher'.*{accepted}"):
        agent_tool(SEARCHER, **given)
    if not set(given) <= {"timeout_s", "max_result_chars"}:
        with pytest.raises(SettingsError, match=f"the handoff to 'searcher'.*{accepted}"):
            handoff(SEARCHER, **given)


@pytest.mark.parametrize("given", [None, 7, object(), PydanticAgent()])
def test_what_is_no_agent_is_refused(given: Any) -> None:
    """So is an agent of pydantic-ai without a name: workers would not find it."""
    with pytest.raises(SettingsError):
        agent_tool(given)
    with pytest.raises(SettingsError):
        handoff(given)


def test_an_agent_among_the_tools_is_refused_with_a_hint() -> None:
    """The error names the functions that make a tool of it."""
    tools: list[Any] = [SEARCHER]
    with pytest.raises(SettingsError, match=r"agent_tool\(…\) or handoff\(…\)"):
        Agent("writer", "You write.", tools)


def test_agents_of_tools_belong_to_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no variable of the module holds, at any depth, bare ones, and each once."""
    (tmp_path / "delegating_module.py").write_text(
        "from pydantic_ai import Agent as Bare\n"
        "from perdure import Agent, agent_tool, handoff\n"
        "known = Bare(name='known')\n"
        "def made():\n"
        "    below = Agent('below', 'You are below.', [agent_tool(known, name='ask_known')])\n"
        "    return Agent('middle', 'You are in the middle.', [agent_tool(below), handoff(Bare(name='bare'))])\n"
        "first = Agent('first', 'You are first.', [handoff(made()), agent_tool('first', name='again')])\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    agents = Agents.from_module("delegating_module", collect)
    sys.modules.pop("delegating_module")
    assert [each.name for each in agents] == ["known", "first", "middle", "below", "bare"]
    assert agents.default.name == "known"


def test_a_tool_that_names_no_agent_and_two_agents_of_one_name_are_refused() -> None:
    """At the start, not in a turn."""
    with pytest.raises(SettingsError, match=r"the tool 'ask', but there is no agent 'nobody'.*Known: writer"):
        Agents([Agent("writer", "You write.", [agent_tool("nobody", name="ask")])])
    tools = [agent_tool(SEARCHER), agent_tool(Agent("searcher", "You do not."), name="other")]
    with pytest.raises(SettingsError, match="two agents have the same name"):
        Agents([Agent("writer", "You write.", tools)])


@pytest.mark.parametrize("arguments", ['{"task": ""}', '{"task": 7}', "{}", '{"task": "x", "more": 1}'])
def test_the_task_is_text(arguments: str) -> None:
    """The model reads what is wrong with its arguments."""
    with pytest.raises(ToolError, match="The arguments of searcher were refused"):
        agent_tool(SEARCHER).parse(arguments)


def test_asks_and_hands_over_without_servers() -> None:
    """Each agent has its own model. A child that waits for a person parks the turn that asked."""
    adapted = adapt(PydanticAgent(name="adapted", instructions="You search."))
    gate = Agent("gate", "You open.", [handoff(SEARCHER, name="over", requires_approval=True)])
    tools: list[Any] = [
        agent_tool(adapted, name="research"),
        agent_tool("gate", name="open"),
        handoff(adapted, name="to_it"),
    ]
    writer = Agent("writer", "You write.", tools)
    models = {"adapted": Scripted("753 BC.", "I took over.", "I am still here."), "gate": Scripted(call("over"))}
    given: dict[str, Any] = {"models": models, "agents": [gate]}
    conversation = Conversation(
        writer, model=Scripted(call("research", task="Rome?"), "Old.", call("to_it")), tenant="acme", **given
    )
    first, second, third = (conversation.ask(text) for text in ("Rome?", "Over!", "Still?"))
    assert (first.reply, first.calls[0].result) == ("Old.", "753 BC.")
    assert first.calls[0].answer is not None
    assert first.calls[0].answer.agent == "adapted"
    assert [(each.reply, each.agent) for each in (second, third)] == [
        ("I took over.", "adapted"), ("I am still here.", "adapted"),
    ]  # fmt: skip
    waiting = ask(writer, "Open!", model=Scripted(call("open", task="Open.")), **given)
    assert (waiting.status, waiting.calls[0].status) == ("parked", "intended")
    assert waiting.calls[0].answer is not None
    assert waiting.calls[0].answer.status == "waiting_approval"
