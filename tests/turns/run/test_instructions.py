"""Instructions and dependencies that functions of the author make for each turn, and the date in the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Agent, Happened, ToolContext, TurnContext, TurnEnding, tool
from perdure.agents import Agents
from perdure.database.engine import Moment
from perdure.errors import InvalidRequest
from perdure.turns.calls.approvals import Decision, decide
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says, system_text


@dataclass
class Shop:
    name: str
    orders: list[str]


@tool(effect="idempotent")
def order(item: str, context: ToolContext[Shop]) -> str:
    """Order an item."""
    context.deps.orders.append(item)
    return f"{item} from {context.deps.name}"


class Counting:
    """Makes instructions and dependencies, and counts its calls."""

    def __init__(self) -> None:
        self.turns: list[TurnContext[Any]] = []
        self.shops: list[Shop] = []

    async def instructions(self, turn: TurnContext[Shop]) -> str:
        self.turns.append(turn)
        return f"You help {turn.user_id}, a customer of {turn.deps.name}. Version {len(self.turns)}."

    def deps(self, turn: TurnContext[Any]) -> Shop:
        assert turn.deps is None
        self.shops.append(Shop(f"shop of {turn.tenant}", []))
        return self.shops[-1]

    def agent(self, *tools: Any, **given: Any) -> Agents:
        return Agents([Agent("assistant", self.instructions, tools, deps=self.deps, **given)])


def _system(harness: Harness, at: int = -1) -> str:
    return system_text(harness.model.requests[at])


def test_a_function_makes_the_instructions(harness: Harness) -> None:
    """It gets the turn and the dependencies. Each turn calls it once, whatever the number of its steps."""
    counting = Counting()
    harness.agents = counting.agent(order)
    harness.script(calls(("order", {"item": "tea"})), says("Ordered."), says("Hi."))
    turn = harness.ask("tea", channel="web", metadata={"timezone": "Asia/Tokyo", "plan": "gold"})
    assert _system(harness, 0).startswith("You help ana, a customer of shop of None. Version 1.\n\n")
    assert _system(harness, 0) == _system(harness, 1)
    seen = counting.turns[0]
    assert (str(seen.turn_id), seen.text, seen.channel, seen.metadata["plan"]) == (
        turn["turn_id"],
        "tea",
        "web",
        "gold",
    )
    assert (seen.timezone, str(seen.now.tzinfo)) == ("Asia/Tokyo", "Asia/Tokyo")
    assert (
        seen.now.isoformat()
        == harness.sql("SELECT started_at FROM turns")[0].started_at.astimezone(seen.now.tzinfo).isoformat()
    )
    assert counting.shops[0].orders == ["tea"]
    harness.ask("hello")
    assert "Version 2." in _system(harness)


@pytest.mark.parametrize(
    ("moment", "name", "nth", "version"),
    [
        ("before", "turns.keep_instructions", 1, 2),
        ("after", "turns.keep_instructions", 1, 1),
        ("before", "turns.step", 1, 1),
        ("after", "turns.step", 1, 1),
        ("before", "turns.settle", 1, 1),
    ],
)
def test_a_resumed_turn_has_the_same_instructions(
    harness: Harness, moment: Moment, name: str, nth: int, version: int
) -> None:
    """What was stored counts, whatever the function returns later. Dependencies are made anew."""
    counting = Counting()
    harness.agents = counting.agent(order)
    harness.script(calls(("order", {"item": "tea"})), *[says("Ordered.")] * 3)
    if (moment, name) == ("before", "turns.step"):
        harness.script(*[calls(("order", {"item": "tea"}))] * 2, says("Ordered."))
    sent = harness.send("tea")
    with harness.crashing(moment, name, nth):
        harness.run(sent.session_id)
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert {system_text(each).partition("\n")[0][-2:-1] for each in harness.model.requests} == {str(version)}
    assert len(counting.shops) == 2


def test_hooks_and_checks_of_doubt_have_the_dependencies(harness: Harness) -> None:
    """Hooks see them in the turn, and a probe in its context."""
    seen: list[Any] = []

    def was_paid(context: ToolContext[Shop]) -> Happened:
        seen.append(context.deps)
        return Happened("Paid.")

    @tool(probe=was_paid, requires_approval=True)
    def pay(context: ToolContext[Shop]) -> str:
        """Pay."""
        seen.append(context.deps)
        return "paid"

    def note(ending: TurnEnding) -> None:
        seen.append(ending.turn.deps)

    counting = Counting()
    harness.agents = counting.agent(pay, before_turn=[lambda turn: seen.append(turn.deps)], after_turn=[note])
    harness.script(calls(("pay", {})), says("Paid."))
    sent = harness.send("pay")
    harness.run(sent.session_id)
    [call] = harness.turn(sent.turn_id)["pending_approvals"]
    decide(harness.runtime, sent.turn_id, Decision(call_id=call["call_id"], decision="approve"))
    with harness.crashing("before", "turns.step", 1):
        harness.run(sent.session_id)
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert seen == [counting.shops[0], counting.shops[1], counting.shops[2], counting.shops[2]]
    assert len(counting.turns) == 1


def test_failures_of_the_functions_have_a_code(harness: Harness) -> None:
    """An error with a code fails the turn with it; a result that is no text is the operator's."""

    def refuse(turn: TurnContext[Any]) -> str:
        raise InvalidRequest(f"There is no shop for {turn.user_id}.")

    harness.agents = Agents([Agent("assistant", refuse)])
    assert harness.ask()["error"] == {"code": "INVALID_REQUEST", "message": "There is no shop for ana."}
    harness.agents = Agents([Agent("assistant", "You help.", deps=refuse)])
    assert harness.ask()["error"] == {"code": "INVALID_REQUEST", "message": "There is no shop for ana."}
    number: Any = lambda _: 3  # noqa: E731
    harness.agents = Agents([Agent("assistant", number)])
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"], turn["attempts"]) == ("failed", "UNKNOWN", 1)
    assert harness.model.requests == []


@pytest.mark.parametrize(
    ("metadata", "zone"),
    [
        ({}, "UTC"),
        ({"timezone": "America/New_York"}, "America/New_York"),
        ({"timezone": "../etc/passwd"}, "UTC"),
        ({"timezone": 3}, "UTC"),
    ],
)
def test_each_prompt_has_the_date_and_the_time_zone(harness: Harness, metadata: dict[str, Any], zone: str) -> None:
    """The zone is that of the message's metadata, or the installation's. The prompts begin with the same text."""
    harness.script(says("a"), says("b"))
    harness.ask("hello", metadata=metadata)
    assert f" in the user's time zone {zone}." in _system(harness)
    harness.move(60)
    harness.ask("again", metadata=metadata)
    first, second = (request.messages[0] for request in harness.model.requests)
    assert first == second
