"""What a turn costs that was handed over: each reply at the price of the model of the agent that wrote it."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, adapt, agent_tool, handoff, tool
from perdure.agents import Agents
from perdure.models.prices import cost
from perdure.models.protocol import ModelReply, ToolCall, Usage
from perdure.settings import BudgetSettings, Settings
from perdure.turns.costs import cost_of, usage
from perdure.turns.run.loop import Runner
from tests.turns.counting import AFTER_LEASE_S
from tests.turns.harness import Crash, Harness

DEAR, CHEAP = "openai:gpt-5", "openai:gpt-5-nano"
LARGE, SMALL = Usage(100_000, 1_000), Usage(1_000, 100)

both = pytest.mark.parametrize(("first", "last"), [(DEAR, CHEAP), (CHEAP, DEAR)], ids=["to cheap", "to dear"])


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


def _price(model: str, used: Usage) -> Decimal:
    found = cost(model, used, Settings())
    assert found is not None
    return found


def _called(name: str, used: Usage, arguments: str = "{}") -> ModelReply:
    return ModelReply("", (ToolCall("c", name, arguments),), used, "m")


def _says(used: Usage = SMALL) -> ModelReply:
    return ModelReply("done", (), used, "m")


def _equip(harness: Harness, first: str, last: str, *, adapted: bool = False, **limits: Any) -> None:
    """The agent `front` hands over to `back`, which has the `limits`."""
    back: Agent
    if adapted:
        bare = PydanticAgent(name="back", instructions="You go on.", model_settings={"max_tokens": 100})
        back = adapt(bare, model=last, **limits)
    else:
        back = Agent("back", "You go on.", [look], model=last, settings={"max_tokens": 100}, **limits)
    over = handoff(back, name="over")
    harness.agents = Agents(
        [Agent("front", "You begin.", [look, over], model=first, settings={"max_tokens": 100}), back]
    )


def _shown(harness: Harness, turn_id: UUID | str) -> Decimal | None:
    return cost_of(harness.database, UUID(str(turn_id)), harness.settings, harness.agents)


def _spent(harness: Harness) -> Decimal:
    return sum((row.amount for row in harness.sql("SELECT amount FROM day_spendings WHERE kind = 'user'")), Decimal())


@both
@pytest.mark.parametrize("adapted", [False, True], ids=["native", "adapted"])
def test_each_reply_has_the_price_of_its_own_agent(harness: Harness, first: str, last: str, *, adapted: bool) -> None:
    """In the cost of the turn, in the sum of the day and in each of the reports."""
    _equip(harness, first, last, adapted=adapted)
    harness.settings = harness.settings.model_copy(update={"budget": BudgetSettings(user_day=Decimal(100))})
    harness.script(_called("look", LARGE), _called("over", LARGE), _says(), _says())
    turn = harness.ask()
    begun, gone_on = _price(first, LARGE) * 2, _price(last, SMALL)
    assert _shown(harness, turn["turn_id"]) == _spent(harness) == begun + gone_on
    harness.ask("again")
    found = {
        by: usage(
            harness.database, harness.settings, harness.agents, since=harness.clock.now() - timedelta(days=1), by=by
        )
        for by in ("agent", "user")
    }
    assert {key: used.cost for (key, _), used in found["agent"].items()} == {"front": begun, "back": gone_on * 2}
    assert [used.cost for used in found["user"].values()] == [begun + gone_on * 2] == [_spent(harness)]


@pytest.mark.parametrize("limits", [{}, {"max_cost": 0.05}], ids=["budget", "max_cost"])
def test_a_cheap_beginning_does_not_use_up_the_limit(harness: Harness, limits: dict[str, Any]) -> None:
    """At the prices of the agent that goes on, the first reply would exceed the limit."""
    _equip(harness, CHEAP, DEAR, **limits)
    if not limits:
        harness.settings = harness.settings.model_copy(update={"budget": BudgetSettings(turn=Decimal("0.05"))})
    harness.script(_called("over", LARGE), _says())
    assert _price(CHEAP, LARGE) < Decimal("0.01") < Decimal("0.05") < _price(DEAR, LARGE)
    assert harness.ask()["status"] == "done"


@pytest.mark.parametrize("limits", [{}, {"max_cost": 0.05}], ids=["budget", "max_cost"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_dear_beginning_uses_up_the_limit(harness: Harness, limits: dict[str, Any], *, is_killed: bool) -> None:
    """At the prices of the agent that goes on, the first reply would be within it; also in another process."""
    _equip(harness, DEAR, CHEAP, **limits)
    if not limits:
        harness.settings = harness.settings.model_copy(update={"budget": BudgetSettings(turn=Decimal("0.05"))})
    harness.script(_called("over", LARGE), _says())
    sent = harness.send()
    if is_killed:
        with harness.crashing("after", "turns.step_handing_off"):
            Runner(harness.runtime, "killed").run(sent.session_id)
        harness.move(AFTER_LEASE_S)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["error"]["code"] == "BUDGET_EXHAUSTED"
    assert _shown(harness, sent.turn_id) == _price(DEAR, LARGE)


@both
def test_a_turn_that_another_process_continues_keeps_its_prices(harness: Harness, first: str, last: str) -> None:
    """The records of prompts tell who wrote the replies; one names its agent only if it is another than before."""
    _equip(harness, first, last)
    harness.settings = harness.settings.model_copy(update={"budget": BudgetSettings(user_day=Decimal(100))})

    def dies(*_: Any) -> ModelReply:
        raise Crash("killed")

    harness.script(_called("look", LARGE), _called("over", LARGE), _called("look", SMALL), dies, _says())
    sent = harness.send()
    with pytest.raises(Crash):
        harness.run(sent.session_id)
    harness.move(AFTER_LEASE_S)
    harness.run(sent.session_id)
    real = _price(first, LARGE) * 2 + _price(last, SMALL) * 2
    assert _shown(harness, sent.turn_id) == _spent(harness) == real


def test_an_agent_that_answers_a_call_keeps_the_limit_of_the_asking_one(harness: Harness) -> None:
    """Its turn was handed over, and its first reply cost more than the asking agent's limit."""
    front = Agent("front", "You begin.", [handoff("back", name="over")], model=DEAR, settings={"max_tokens": 100})
    back = Agent("back", "You go on.", [look], model=CHEAP, settings={"max_tokens": 100})
    boss = Agent("boss", "You ask.", [agent_tool(front, name="ask")], model=CHEAP, max_cost=0.05)
    harness.agents = Agents([boss, front, back])
    harness.script(_called("ask", SMALL, '{"task": "look"}'), _called("over", LARGE), _says(), _says())
    sent = harness.send(agent="boss")
    harness.run(sent.session_id)
    while harness.waker.sessions:
        harness.run(harness.waker.sessions.pop())
    assert harness.turn(sent.turn_id)["status"] == "failed"
    assert _shown(harness, sent.turn_id) == _price(CHEAP, SMALL) + _price(DEAR, LARGE)
