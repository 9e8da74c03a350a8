"""`POST /v1/turns/{id}/approval`: its responses and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from starlette.testclient import TestClient

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.channels.http.schemas.turns import Turn
from perdure.runtime import Runtime
from tests.channels.test_bad_input import refused
from tests.turns.scripted import Scripted, calls, says

Say = Callable[..., dict[str, Any]]
Run = Callable[[str], None]


@tool(requires_approval=True, effect="idempotent")
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.fixture
def agents() -> Agents:
    """An agent whose tool needs an approval."""
    return Agents([Agent("assistant", "You pay.", [pay])])


@pytest.fixture
def runtime(runtime: Runtime) -> Runtime:
    """A runtime whose model requests two payments in one reply."""
    model = Scripted(calls(("pay", {"amount": 5}), ("pay", {"amount": 6})), says("paid"))
    return replace(runtime, models=lambda _name: model)


@pytest.fixture
def turn(client: TestClient, say: Say, run: Run) -> dict[str, Any]:
    """A turn that waits for approvals."""
    sent = say("pay")
    run(sent["session_id"])
    found: dict[str, Any] = client.get(f"/v1/turns/{sent['turn_id']}").json()
    return found


def test_a_call_is_approved_with_other_arguments_and_another_denied(
    client: TestClient, run: Run, turn: dict[str, Any]
) -> None:
    """An approval returns 202 and the turn. The approved call runs with the approval's arguments, not the model's."""
    path = f"/v1/turns/{turn['turn_id']}"
    Turn.model_validate(turn)
    assert turn["status"] == "waiting_approval"
    first, second = turn["pending_approvals"]
    assert client.get(f"/v1/sessions/{turn['session_id']}").json()["state"] == "waiting_approval"

    approval = {"call_id": first["call_id"], "decision": "approve", "arguments": {"amount": 4}}
    answered = client.post(f"{path}/approval", json=approval)
    assert answered.status_code == 202
    assert answered.json()["pending_approvals"] == [second]
    assert client.post(f"{path}/approval", json={"call_id": second["call_id"], "decision": "deny"}).status_code == 202

    run(turn["session_id"])
    assert client.get(path).json()["reply"]["text"] == "paid"
    messages = client.get(f"/v1/sessions/{turn['session_id']}/messages").json()
    paid, denied = (each["content"] for each in messages if each["role"] == "tool")
    assert paid.endswith("paid 4")
    assert "denied this call" in denied


def test_invalid_approvals_are_refused(client: TestClient, turn: dict[str, Any]) -> None:
    """A malformed decision or invalid arguments get 400, an unknown call gets 404, and a decided call gets 409."""
    path = f"/v1/turns/{turn['turn_id']}/approval"
    call_id = turn["pending_approvals"][0]["call_id"]
    approve = {"call_id": call_id, "decision": "approve"}
    for body in ({}, {**approve, "decision": "perhaps"}, {**approve, "more": 1}, {**approve, "arguments": {"a": 1}},
                 {**approve, "arguments": {"amount": "\x00"}}):  # fmt: skip
        refused(client.post(path, json=body), 400, "INVALID_REQUEST")
    refused(client.post(path, content=b"[]"), 400, "INVALID_REQUEST")
    refused(client.post(path, json={**approve, "call_id": "nobody's"}), 404, "NOT_FOUND")
    for missing in (uuid4(), "no id"):
        refused(client.post(f"/v1/turns/{missing}/approval", json=approve), 404, "NOT_FOUND")
    assert client.post(path, json=approve).status_code == 202
    refused(client.post(path, json=approve), 409, "CONFLICT")
