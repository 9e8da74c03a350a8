"""The limits that an agent declares: tokens and cost of a turn, the model's window, and the turns in a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.models.protocol import ModelReply, ToolCall, Usage
from perdure.turns.prompt.tools import window
from tests.turns.harness import Harness
from tests.turns.scripted import says


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


def _looks(usage: Usage | None) -> ModelReply:
    return ModelReply("", (ToolCall("c", "look", "{}"),), usage, "gpt-5-mini")


def _limit(harness: Harness, *tools: Any, **given: Any) -> None:
    harness.agents = Agents([Agent("assistant", "You help.", tools, model="openai:gpt-5-mini", **given)])


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_tokens": 2_000}, "2,000 tokens"),
        ({"max_cost": 0.000_5}, "0.0005 US dollars"),
        ({"max_steps": 2}, "2 steps"),
    ],
)
def test_a_turn_stops_at_its_limit(harness: Harness, limits: dict[str, Any], said: str) -> None:
    """Before the call that would go beyond it, the turn fails with a code. The next turn has the whole limit again."""
    _limit(harness, look, **limits)
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


def test_the_prompt_has_as_many_turns_as_the_agent_keeps(harness: Harness) -> None:
    """Fewer or more than the installation's `PERDURE_MEMORY__WORKING_TURNS`."""
    memory = harness.settings.memory.model_copy(update={"working_turns": 3})
    harness.settings = harness.settings.model_copy(update={"memory": memory})
    for kept in (1, 2, None, 5):
        _limit(harness, keep_turns=kept)
        harness.script(*[says("yes")] * 6)
        user = f"user {kept}"
        for number in range(6):
            harness.ask(str(number), user_id=user)
        asked = [each.content for each in harness.model.requests[-1].messages if each.role == "user"]
        assert asked == [str(number) for number in range(6)][-(kept or 3) :]


def test_an_agents_window_comes_first(harness: Harness) -> None:
    """A known model has its own window, an unknown one the installation's; the agent's number replaces both."""
    settings = harness.settings.model_copy(update={"model_window": 4_000})
    known, unknown = "openai:gpt-5-mini", "vllm:qwen"
    assert window(settings, Agent("a", "", model=known)) == 400_000
    assert window(settings, Agent("a", "", model=unknown)) == 4_000
    assert window(settings, Agent("a", "", model=known, window=8_000)) == 8_000
    harness.agents = Agents([Agent("assistant", "Be kind.", window=600)])
    harness.script(says("a" * 900), says("b"))
    harness.ask("x" * 900)
    harness.ask("next")
    assert [each.content for each in harness.model.requests[-1].messages[1:]] == ["next"]
