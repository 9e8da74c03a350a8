"""Agents of pydantic-ai's examples run unchanged, and give what a plain run gives, also after crashes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import DeferredToolRequests

from perdure import adapt
from perdure.adapters.pydantic_ai import messages
from perdure.adapters.pydantic_ai.adapt import AdaptedAgent
from perdure.agents import Agents
from perdure.testing import ask
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.lease.claim import claim
from perdure.turns.lease.tenure import Tenure
from perdure.turns.transcript import Transcript
from tests.adapters.pydantic_ai.documented import DOCUMENTED, Documented, Line, example, shown
from tests.turns.harness import Harness

NAMES = sorted(DOCUMENTED)
DECIDED_S = 31


def _plain(name: str) -> tuple[Documented, list[AgentRunResult[Any]]]:
    """A plain run of the conversation."""
    made = DOCUMENTED[name]()

    async def converse() -> list[AgentRunResult[Any]]:
        results: list[AgentRunResult[Any]] = []
        for prompt in made.prompts:
            history = results[-1].all_messages() if results else None
            deps = None if made.deps is None else made.deps()
            results.append(await made.agent.run(prompt, deps=deps, message_history=history))
        return results

    with made.scripted():
        return made, asyncio.run(converse())


def _adapted(given: Documented) -> AdaptedAgent:
    deps = given.deps
    return adapt(given.agent, name="example", deps=None if deps is None else lambda _: deps(), memory=False)


def _stored(harness: Harness, session_id: UUID) -> list[Any]:
    """The messages of the session's turns, as the next turn's run receives them."""
    harness.send("another")
    tenure = claim(harness.runtime, session_id, "by hand")
    assert isinstance(tenure, Tenure)
    transcript = Transcript.load(harness.database, tenure.at_hand)
    return messages.history(transcript.turns[:-1], strictly=None)


def _comparable(found: Sequence[ModelMessage]) -> Any:
    """Messages without what differs between two runs, or is made anew by each: times, ids and system prompts."""
    records = ModelMessagesTypeAdapter.dump_python(list(found), mode="json")
    for record in records:
        for member in ("timestamp", "run_id", "conversation_id", "instructions", "usage"):
            record.pop(member, None)
        record["parts"] = [
            {name: value for name, value in part.items() if name not in {"timestamp", "tool_call_id"}}
            for part in record["parts"]
            if part["part_kind"] != "system-prompt"
        ]
    return records


def _output(turn: dict[str, Any]) -> Any:
    return turn["reply"].get("data", turn["reply"]["text"])


@pytest.mark.parametrize("name", NAMES)
def test_in_a_unit_test(name: str) -> None:
    """`ask` runs the agent, and the reply is what a plain run prints."""
    _, (plain, *_) = _plain(name)
    given = DOCUMENTED[name]()
    with given.scripted():
        answer = ask(_adapted(given), given.prompts[0])
    assert answer.status == "done"
    assert (answer.reply if answer.data is None else answer.data) == json.loads(shown(plain.output))


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation(harness: Harness, name: str) -> None:
    """The outputs are those of plain runs with the history, and so are the messages that the model receives."""
    made, plain = _plain(name)
    given = DOCUMENTED[name]()
    harness.agents = Agents([_adapted(given)])
    with given.scripted():
        turns = [harness.ask(prompt) for prompt in given.prompts]
    assert [turn["status"] for turn in turns] == ["done"] * len(turns)
    assert [_output(turn) for turn in turns] == [json.loads(shown(each.output)) for each in plain]
    assert [_comparable(each) for each in given.seen] == [_comparable(each) for each in made.seen]
    assert _comparable(_stored(harness, UUID(turns[0]["session_id"]))) == _comparable(plain[-1].all_messages())


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_after_a_crash_at_each_step(harness: Harness, name: str) -> None:
    """The turn continues after its last committed reply, and its model is not asked again for what is stored."""
    _, (plain, *_) = _plain(name)
    given = DOCUMENTED[name]()
    harness.agents = Agents([_adapted(given)])
    sent = harness.send(given.prompts[0])
    crashes = 0
    with given.scripted():
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
    assert _output(turn) == json.loads(shown(plain.output))
    replies = [each for each in plain.all_messages() if each.kind == "response"]
    assert len(given.seen) == len(replies), "no stored reply was asked for again"


def test_a_call_that_waits_for_approval(harness: Harness) -> None:
    """The example's run ends with the request, and a second run takes the decision. Here, one turn waits for it."""
    approval = example("tool_approval")
    script: list[Line] = [[("delete_file", {"path": "a.txt"})], "It is gone."]
    given, plain = (Documented(approval.agent, script, ["Delete a.txt."]) for _ in range(2))

    async def decided() -> Any:
        first = await plain.agent.run(plain.prompts[0])
        assert isinstance(first.output, DeferredToolRequests)
        results = first.output.build_results(approve_all=True)
        return await plain.agent.run(message_history=first.all_messages(), deferred_tool_results=results)

    with plain.scripted():
        result = asyncio.run(decided())
    harness.agents = Agents([_adapted(given)])
    with given.scripted():
        turn = harness.ask(given.prompts[0])
        assert turn["status"] == "waiting_approval"
        decision = parse_decision({"call_id": "call_0", "decision": "approve"})
        decide(harness.runtime, UUID(turn["turn_id"]), decision)
        harness.run(UUID(turn["session_id"]))
    turn = harness.turn(UUID(turn["turn_id"]))
    assert (turn["status"], turn["reply"]["text"]) == ("done", result.output)
    assert [_comparable(each) for each in given.seen] == [_comparable(each) for each in plain.seen]
