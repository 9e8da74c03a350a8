"""Consecutive prompts of a conversation begin alike, as the providers receive them."""

from __future__ import annotations

from statistics import mean
from uuid import UUID

import pytest

from benchmarks.prefix import PAST, WIRES, Talking, question, shares
from perdure.agents import Agents
from perdure.builtin import assistant
from perdure.models.protocol import Role
from perdure.models.providers import messages_wire
from perdure.models.providers.endpoint import CACHE_MARK, Quirks
from perdure.sessions.ending import request_end
from perdure.sessions.running_summary import summarise_due
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says


@pytest.mark.long
@pytest.mark.parametrize("past", [False, True])
def test_most_of_a_prompt_is_the_beginning_of_the_previous_one(harness: Harness, *, past: bool) -> None:
    """At turns 2 to 60: at least 0.8 of a prompt, with the summaries of the background and with a past."""
    harness.agents = Agents([assistant])
    if past:
        for number in range(3):
            sent = harness.send(question(f"past {number}"))
            harness.run(sent.session_id)
            request_end(harness.database, sent.session_id, "enough")
            harness.move(60)
        for statement in PAST:
            with harness.database.engine.begin() as connection:
                connection.execute(statement, {"user_id": "ana", "words": ["lamp", "boat", "hat"]})
    model = Talking()
    harness.any_model = model
    for number in range(60):
        harness.ask(question(number))
        summarise_due(harness.database, harness.clock, harness.model, 10)
    for wire in WIRES.values():
        found = shares(model.requests, wire)
        assert mean(found.each) >= 0.8
        assert sum(each < 0.5 for each in found.each) <= 5, "only the prompts that turns have left begin otherwise"


def test_the_steps_of_a_turn_only_add_to_its_prompt(harness: Harness) -> None:
    """The second prompt of a turn begins with the whole first one."""
    harness.agents = Agents([assistant])
    harness.script(says("Hello."))
    harness.ask("hello")
    model = harness.model
    harness.script(calls(("calculator", {"expression": "6*7"})), says("42"))
    harness.ask("what is 6*7?")
    first, second = model.requests[-2:]
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    assert first.cache_key == second.cache_key == str(UUID(str(first.cache_key)))


def test_the_marks_are_where_later_prompts_are_the_same(harness: Harness) -> None:
    """Anthropic's marks end the instructions, the system prompt, the earlier turns, and the prompt itself."""
    harness.agents = Agents([assistant])
    for text in ("one", "two", "three"):
        harness.ask(text)
    bodies = [messages_wire.request_body("m", each, Quirks(caches=True)) for each in harness.model.requests[-2:]]
    marked = [
        [block["text"] for turn in body["messages"] for block in turn["content"] if CACHE_MARK in block]
        for body in bodies
    ]
    assert marked[1][0] == "ok", "the reply to the second message"
    assert marked[1][1].endswith("three")
    assert len(marked[1]) == 2
    assert [CACHE_MARK in each for each in bodies[1]["system"]] == [True]
    notes = [each for each in harness.model.requests[-1].messages if each.role is Role.SYSTEM]
    assert "The user is writing on the channel" not in notes[0].content
