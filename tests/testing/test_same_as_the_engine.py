"""The same scripts give the same turns with `perdure.testing` and with the engine on PostgreSQL."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pytest

from perdure.agents import Agents
from perdure.models.protocol import Message, ModelRequest, Role, ToolCall
from perdure.snapshots import queries
from perdure.testing import Answer, Conversation, Scripted
from perdure.turns.calls import approvals
from perdure.turns.calls.approvals import Decision
from tests.testing.scenarios import SCENARIOS, Scenario
from tests.turns.harness import PATIENCE_S, Harness

STATUSES = {"queued": "parked"}
"""Maps statuses of the table `turns` to their names in `Answer`, where the two differ."""


@dataclass(frozen=True)
class Observed:
    """The result of a turn, from `perdure.testing` or from the engine."""

    status: str
    reply: str | None
    error_code: str | None
    steps: int
    calls: list[tuple[str, str]]
    transcript: list[Message]
    usage: tuple[int, int] | None


def observed(answer: Answer) -> Observed:
    """The result of a turn that `perdure.testing` ran."""
    return Observed(
        answer.status,
        answer.reply,
        answer.error_code,
        answer.steps,
        [(each.tool, each.status) for each in answer.calls],
        list(answer.transcript),
        None if answer.usage is None else (answer.usage.input_tokens, answer.usage.output_tokens),
    )


class Engine:
    """Runs a scenario in one session of the engine on PostgreSQL."""

    def __init__(self, harness: Harness, scenario: Scenario) -> None:
        self.harness = harness
        self.scenario = scenario
        self.model = Scripted(*scenario.script, clock=harness.clock)
        harness.agents = Agents([scenario.make()])
        harness.script(*[self.model.respond] * 20)

    def ask(self, text: str) -> Observed:
        """Accept a message, run its turn and decide its approvals."""
        metadata = {"language": self.scenario.language} if self.scenario.language else {}
        accepted = self.harness.send(text, user_id="ana", channel="test", metadata=metadata)
        turn = self._run(accepted.session_id, accepted.turn_id)
        return self._observed(accepted.turn_id, turn)

    def _run(self, session_id: UUID, turn_id: UUID) -> dict[str, Any]:
        """Run a turn, and the turns of the agents that it asks."""
        self.harness.run(session_id)
        while True:
            turn = self.harness.turn(turn_id)
            asked = [UUID(each["turn_id"]) for each in turn.get("children", []) if each["status"] == "accepted"]
            if turn["status"] == "waiting_approval":
                self._decide(turn_id, turn["pending_approvals"])
            elif not asked:
                return turn
            for child in asked:
                self._run(child, child)
            self.harness.run(session_id)

    def variables(self) -> Any:
        """The session's working variables."""
        [session] = self.harness.sql("SELECT session_id FROM sessions WHERE depth = 0")
        rows = self.harness.database.run(queries.KEPT, {"session_id": session.session_id})
        return json.loads(rows[0].variables) if rows else {}

    def _decide(self, turn_id: UUID, pending: list[dict[str, Any]]) -> None:
        rows = self.harness.sql("SELECT tool_calls FROM messages WHERE turn_id = %(id)s ORDER BY seq DESC", id=turn_id)
        calls = {each["id"]: ToolCall.from_dict(each) for each in rows[0].tool_calls}
        for each in pending:
            approve = self.scenario.approve
            approved = approve(calls[each["call_id"]]) if callable(approve) else approve
            decision = Decision(call_id=each["call_id"], decision="approve" if approved else "deny")
            approvals.decide(self.harness.runtime, turn_id, decision)

    def _observed(self, turn_id: UUID, turn: dict[str, Any]) -> Observed:
        rows = self.harness.sql("SELECT * FROM messages WHERE turn_id = %(id)s ORDER BY seq", id=turn_id)
        effects = {
            (row.message_seq, row.position): row.status
            for row in self.harness.sql("SELECT * FROM tool_effects WHERE turn_id = %(id)s", id=turn_id)
        }
        transcript, calls = [], []
        for row in rows:
            requested = tuple(ToolCall.from_dict(each) for each in row.tool_calls or ())
            transcript.append(Message(Role(row.role), row.content, requested, row.tool_call_id))
            calls += [
                (each.name, effects.get((row.seq, position), "failed")) for position, each in enumerate(requested)
            ]
        reason = turn["error"] or turn["delayed"]
        return Observed(
            STATUSES.get(turn["status"], turn["status"]),
            turn["reply"] and turn["reply"]["text"],
            reason and reason["code"],
            turn["steps"] if turn["settled_at"] else sum(each.role is Role.ASSISTANT for each in transcript),
            calls,
            transcript,
            _tokens(turn),
        )


def _tokens(turn: dict[str, Any]) -> tuple[int, int] | None:
    if turn["usage"] is None:
        return None if turn["settled_at"] else (0, 0)  # the usage of an unsettled turn is not shown
    return turn["usage"]["input_tokens"], turn["usage"]["output_tokens"]


def prompts(requests: list[ModelRequest]) -> list[tuple[object, ...]]:
    """The messages, without the time and the code of the installation's notes, and the tools sent to the model."""
    return [([_coded(message) for message in each.messages], [tool.name for tool in each.tools]) for each in requests]


def _coded(message: Message) -> Message:
    content = re.sub(r"user's message follows \(\w+\)", "user's message follows (code)", message.content)
    return replace(message, content=re.sub(r"Today is [^.]*\d\d:\d\d", "Today is (time)", content))


def _join_hanging_tools() -> None:
    """Wait for tools that still run after their timeout, because they write their results to the test's database."""
    for thread in threading.enumerate():
        if thread.name.startswith("perdure-tool-"):
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    "name",
    [name if at % 3 == 0 else pytest.param(name, marks=pytest.mark.long) for at, name in enumerate(SCENARIOS)],
)
def test_a_turn_is_the_same_with_testing_and_on_postgresql(name: str, harness: Harness) -> None:
    """Each scenario has the same results, prompts and variables with `perdure.testing` and with the engine."""
    scenario = SCENARIOS[name]
    engine = Engine(harness, scenario)
    expected = [engine.ask(text) for text in scenario.texts]

    model = Scripted(*scenario.script)
    conversation = Conversation(
        scenario.make(),
        model=model,
        user_id="ana",
        channel="test",
        language=scenario.language,
        approve=scenario.approve,
        settings=harness.settings,
    )
    answers = [conversation.ask(text) for text in scenario.texts]

    assert [observed(each) for each in answers] == expected
    assert prompts(model.requests) == prompts(engine.model.requests)
    assert answers[-1].working_variables == engine.variables()
    _join_hanging_tools()
