"""`POST /v1/turns/{id}/results`: its responses and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from perdure import Agent, external_tool
from perdure.agents import Agents
from perdure.channels.http.schemas.turns import Turn
from perdure.runtime import Runtime
from tests.turns.scripted import Scripted, calls, says

Say = Callable[..., dict[str, Any]]
Run = Callable[[str], None]


@pytest.fixture
def agents() -> Agents:
    """An agent with a tool that a client runs."""
    return Agents([Agent("assistant", "You scan.", [external_tool("scan", "Scan a barcode.")])])


@pytest.fixture
def runtime(runtime: Runtime) -> Runtime:
    """A runtime whose model scans twice in one reply."""
    model = Scripted(calls(("scan", {"side": 1}), ("scan", {"side": 2})), says("scanned"))
    return replace(runtime, models=lambda _name: model)


@pytest.fixture
def turn(client: TestClient, say: Say, run: Run) -> dict[str, Any]:
    """A turn that waits for a client."""
    sent = say("scan")
    run(sent["session_id"])
    found: dict[str, Any] = client.get(f"/v1/turns/{sent['turn_id']}").json()
    return found


def test_results_resume_the_turn(client: TestClient, run: Run, turn: dict[str, Any]) -> None:
    """Each result returns 202 and the turn. The first one of a call counts, and may be sent again later."""
    path = f"/v1/turns/{turn['turn_id']}"
    Turn.model_validate(turn)
    assert (turn["status"], turn["waiting_for"]["kind"]) == ("parked", "client")
    assert [each["arguments"] for each in turn["pending_calls"]] == [{"side": 1}, {"side": 2}]
    first, second = (each["call_id"] for each in turn["pending_calls"])
    one = client.post(f"{path}/results", json={"call_id": first, "result": None})
    assert (one.status_code, [each["call_id"] for each in one.json()["pending_calls"]]) == (202, [second])
    client.post(f"{path}/results", json={"call_id": first, "result": "other"})
    client.post(f"{path}/results", json={"call_id": second, "error": "No camera."})
    run(turn["session_id"])
    assert client.get(path).json()["reply"]["text"] == "scanned"
    again = client.post(f"{path}/results", json={"call_id": second, "result": "late"})
    assert (again.status_code, again.json()["status"]) == (202, "done")
    messages = client.get(f"/v1/sessions/{turn['session_id']}/messages").json()
    assert [each["content"] for each in messages if each["role"] == "tool"] == ["null", "Error: No camera."]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"call_id": "call_0"}, 400),
        ({"call_id": "call_0", "result": 1, "error": "both"}, 400),
        ({"call_id": "call_0", "error": None}, 400),
        ({"result": 1}, 400),
        ({"call_id": "call_9", "result": 1}, 404),
    ],
)
def test_refused_results(client: TestClient, turn: dict[str, Any], body: dict[str, Any], status: int) -> None:
    """A refused result changes nothing."""
    answer = client.post(f"/v1/turns/{turn['turn_id']}/results", json=body)
    assert answer.status_code == status, answer.text
    assert client.get(f"/v1/turns/{turn['turn_id']}").json()["pending_calls"] == turn["pending_calls"]
