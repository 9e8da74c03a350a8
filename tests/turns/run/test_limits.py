"""The limits that an agent declares: tokens and cost of a turn, the model's window, and the turns in a prompt."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, adapt, effect, tool
from perdure.agents import Agents
from perdure.models.protocol import ModelReply, Role, ToolCall, Usage
from perdure.settings import Settings
from perdure.turns import costs
from perdure.turns.prompt.tools import window
from perdure.turns.transcript import Entry
from tests.turns.harness import Harness
from tests.turns.scripted import says, spoken


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


def _looks(usage: Usage | None) -> ModelReply:
    return ModelReply("", (ToolCall("c", "look", "{}"),), usage, "gpt-5-mini")


def _limit(harness: Harness, *tools: Any, **given: Any) -> None:
    harness.agents = Agents([Agent("assistant", "You help.", tools, model="openai:gpt-5-mini", **given)])


def _limit_adapted(harness: Harness, *tools: Any, **given: Any) -> None:
    bare = PydanticAgent(name="assistant", instructions="You help.")
    for each in tools:
        bare.tool_plain(metadata=effect("pure"))(each.function)
    harness.agents = Agents([adapt(bare, model="openai:gpt-5-mini", **given)])


@pytest.mark.parametrize("limit", [_limit, _limit_adapted])
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_tokens": 2_000}, "2,000 tokens"),
        ({"max_cost": 0.000_5}, "0.0005 US dollars"),
        ({"max_steps": 2}, "2 steps"),
    ],
)
def test_a_turn_stops_at_its_limit(harness: Harness, limits: dict[str, Any], said: str, limit: Any) -> None:
    """Before the call that would go beyond it, the turn fails with a code. The next turn has the whole limit again."""
    limit(harness, look, **limits)
    harness.script(*[_looks(Usage(1_000, 0))] * 2, says("never"))
    turn = harness.ask()
    assert (turn["status"], turn["steps"]) == ("failed", 2)
    assert turn["error"] == {"code": "BUDGET_EXHAUSTED", "message": f"I could not finish within {said}, so I stopped."}
    assert harness.ask("again")["reply"]["text"] == "never"


def test_a_limit_counts_what_an_earlier_worker_used(harness: Harness) -> None:
    """The usage is in the transcript, so a crash gives the turn no second budget."""
    _limit(harness, look, max_tokens=2_000)
    harness.script(*[_looks(Usage(500, 500))] * 2, says("never"))
    sent = harness.send()
    with harness.crashing("after", "turns.step", 2):
        harness.run(sent.session_id)
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["error"]["code"] == "BUDGET_EXHAUSTED"
    assert len(harness.model.requests) == 2


def test_a_cost_that_cannot_be_known_fails_the_turn(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A limit of money that is not kept would be worse. The log says what to do."""
    harness.agents = Agents([Agent("assistant", "You help.", model="vllm:qwen", max_cost=1)])
    assert harness.ask()["error"]["code"] == "UNKNOWN"
    assert "agent 'assistant' has max_cost=1, but the prices of its model 'vllm:qwen' are unknown" in caplog.text
    assert harness.model.requests == []


@pytest.mark.long
@pytest.mark.parametrize("limit", [_limit, _limit_adapted])
def test_the_prompt_has_as_many_turns_as_the_agent_keeps(harness: Harness, limit: Any) -> None:
    """Fewer or more than the installation's `PERDURE_MEMORY__WORKING_TURNS`."""
    memory = harness.settings.memory.model_copy(update={"working_turns": 3})
    harness.settings = harness.settings.model_copy(update={"memory": memory})
    for kept in (1, 2, None, 5):
        limit(harness, keep_turns=kept)
        harness.script(*[says("yes")] * 6)
        user = f"user {kept}"
        for number in range(6):
            harness.ask(str(number), user_id=user)
        asked = [each.content for each in harness.model.requests[-1].messages if each.role == "user"]
        shown = 6 if kept == 5 else kept or 3  # up to ten turns, because turns leave in blocks
        assert asked == [str(number) for number in range(6)][-shown:]


def test_an_agents_window_comes_first(harness: Harness) -> None:
    """A known model has its own window, an unknown one the installation's; the agent's number replaces both."""
    settings = harness.settings.model_copy(update={"model_window": 4_000})
    known, unknown = "openai:gpt-5-mini", "vllm:qwen"
    assert window(settings, Agent("a", "", model=known)) == 400_000
    assert window(settings, Agent("a", "", model=unknown)) == 4_000
    assert window(settings, Agent("a", "", model=known, window=8_000)) == 8_000
    adapted = adapt(PydanticAgent(name="assistant", instructions="Be kind."), window=600)
    for agent in (Agent("assistant", "Be kind.", window=600), adapted):
        harness.agents = Agents([agent])
        harness.script(says("a" * 900), says("b"))
        harness.ask("x" * 900, user_id=str(agent.window) + type(agent).__name__)
        harness.ask("next", user_id=str(agent.window) + type(agent).__name__)
        assert [each.content for each in spoken(harness.model.requests[-1])] == ["next"]


def test_an_adapted_agent_costs_what_its_own_model_costs() -> None:
    """Not what the model of `PERDURE_MODEL` would cost, which it does not ask."""
    bare = PydanticAgent("openai:gpt-5-mini", name="assistant", defer_model_check=True)
    settings = Settings.model_construct(model="anthropic:claude-opus-4-1")
    reply = Entry(UUID(int=1), Role.ASSISTANT, "yes", usage=Usage(1_000_000, 0), model="gpt-5-mini")
    own, given = adapt(bare), adapt(bare, model="openai:gpt-5-nano")
    assert costs.spent([reply], own, settings) == Decimal("0.25")
    assert costs.spent([reply], given, settings) == Decimal("0.05")
