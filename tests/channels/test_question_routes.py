"""A question to the user over HTTP: the turn shows it, and the user's next message answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from perdure import Agent, ask_user
from perdure.agents import Agents
from perdure.channels.http.schemas.sessions import Call
from perdure.channels.http.schemas.turns import Turn
from perdure.runtime import Runtime
from tests.turns.scripted import Scripted, calls, says


@pytest.fixture
def agents() -> Agents:
    """An agent with a question."""
    return Agents([Agent("assistant", "You help.", [ask_user(bool, name="ask_milk")])])


@pytest.fixture
def runtime(runtime: Runtime) -> Runtime:
    """A runtime whose model asks."""
    model = Scripted(calls(("ask_milk", {"question": "Milk?"})), says("Here."))
    return replace(runtime, models=lambda _name: model)


def _question(client: TestClient, sent: dict[str, Any]) -> str:
    """The state of the question in the transcript."""
    messages = client.get(f"/v1/sessions/{sent['session_id']}/messages").json()
    [call] = [call for each in messages for call in each.get("tool_calls", ())]
    return str(Call.model_validate(call).question)


@pytest.mark.parametrize("by_value", [False, True])
def test_a_question_is_answered(
    client: TestClient, say: Callable[..., dict[str, Any]], run: Callable[[str], None], by_value: bool
) -> None:
    """`waiting_for` has the question, and what did not fit; the answer has the id of the turn that waits."""
    sent = say("tea")
    path = f"/v1/turns/{sent['turn_id']}"
    problem = None
    for number, (text, value) in enumerate([("hm", "hm"), ("yes", True)], start=1):
        run(sent["session_id"])
        turn = client.get(path).json()
        Turn.model_validate(turn)
        waiting = turn["waiting_for"]
        assert (turn["status"], waiting["kind"], waiting["question"]) == ("parked", "user", "Milk?")
        assert (waiting["asked"], waiting["problem"]) == (number, problem)
        assert turn["pending_calls"] == []
        assert _question(client, sent) == "open"
        if by_value:
            brought = client.post(f"{path}/results", json={"call_id": waiting["call_id"], "result": value})
            assert brought.status_code == 202
        else:
            answered = say(text)
            assert (answered["turn_id"], answered["duplicate"]) == (sent["turn_id"], False)
        problem = "Please answer yes or no."
    run(sent["session_id"])
    assert client.get(path).json()["reply"]["text"] == "Here."
    assert _question(client, sent) == "answered"
