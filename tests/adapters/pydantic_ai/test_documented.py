"""Agents from pydantic-ai's documentation run unchanged, and give what a plain run gives, also after crashes."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai.messages import ModelMessagesTypeAdapter

from perdure import adapt
from perdure.adapters.pydantic_ai import messages
from perdure.agents import Agents
from perdure.testing import ask
from perdure.turns.lease.claim import claim
from perdure.turns.lease.tenure import Tenure
from perdure.turns.transcript import Transcript
from tests.adapters.pydantic_ai.documented import documented, shown
from tests.turns.harness import Harness

NAMES = sorted(documented())
DECIDED_S = 31


def _plain(name: str) -> Any:
    given = documented()[name]
    deps = None if given.deps is None else given.deps()
    return asyncio.run(given.agent.run(given.prompt, model=given.model(), deps=deps))


def _adapted(name: str) -> Any:
    given = documented()[name]
    deps = given.deps
    made = adapt(given.agent, name=name, deps=None if deps is None else lambda _: deps(), memory=False)
    return given, made.with_model(given.model())


def _messages(harness: Harness, session_id: UUID) -> list[Any]:
    """The messages of the session's first turn, as the next turn's run receives them."""
    harness.send("another")
    tenure = claim(harness.runtime, session_id, "by hand")
    assert isinstance(tenure, Tenure)
    transcript = Transcript.load(harness.database, tenure.at_hand)
    return messages.history(transcript.turns[:-1], strictly=None)


def _comparable(found: list[Any]) -> Any:
    """Messages without what differs between two runs, or is made anew by each: times, ids and system prompts."""
    records = ModelMessagesTypeAdapter.dump_python(found, mode="json")
    for record in records:
        for member in ("timestamp", "run_id", "conversation_id", "instructions", "usage"):
            record.pop(member, None)
        record["parts"] = [
            {name: value for name, value in part.items() if name not in {"timestamp", "tool_call_id"}}
            for part in record["parts"]
            if part["part_kind"] != "system-prompt"
        ]
    return records


@pytest.mark.parametrize("name", NAMES)
def test_in_a_unit_test(name: str) -> None:
    """`ask` runs the agent, and the reply is what a plain run prints."""
    plain = _plain(name)
    given, made = _adapted(name)
    answer = ask(made, given.prompt)
    assert answer.status == "done"
    assert (
        answer.reply == plain.output
        if isinstance(plain.output, str)
        else answer.data == json.loads(shown(plain.output))
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_messages_are_those_of_a_plain_run(harness: Harness, name: str) -> None:
    """The next turn's run receives the same messages as after a plain run."""
    plain = _plain(name)
    given, made = _adapted(name)
    harness.agents = Agents([made])
    turn = harness.ask(given.prompt)
    assert turn["status"] == "done"
    assert turn["reply"].get("data", turn["reply"]["text"]) == json.loads(shown(plain.output))
    found = _comparable(_messages(harness, UUID(turn["session_id"])))
    assert found == _comparable(plain.all_messages())


@pytest.mark.parametrize("name", NAMES)
def test_after_a_crash_at_each_step(harness: Harness, name: str) -> None:
    """The turn continues after its last committed reply, and its model is not asked again for what is stored."""
    plain = _plain(name)
    given, made = _adapted(name)
    harness.agents = Agents([made])
    sent = harness.send(given.prompt)
    crashes = 0
    while True:
        try:
            with harness.crashing("after", "turns.step"):
                harness.run(sent.session_id, alone=True)
        except AssertionError:  # the turn committed no further step
            break
        crashes += 1
        harness.move(DECIDED_S)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], crashes > 1) == ("done", True)
    assert turn["reply"].get("data", turn["reply"]["text"]) == json.loads(shown(plain.output))
    assert len(given.seen) == len(given.script), "no stored reply was asked for again"
