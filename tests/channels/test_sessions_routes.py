"""`POST /v1/sessions/{id}/fork`: responses, required keys and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from pydantic import SecretStr, ValidationError
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.sessions import Forked, ForkSession, Session
from perdure.runtime import Runtime
from tests.channels.conftest import BASE_URL, SERVICE_KEY
from tests.channels.test_bad_input import refused

Say = Callable[..., dict[str, Any]]
Run = Callable[[str], None]
Rows = Callable[[], dict[str, int]]


@pytest.fixture
def talked(say: Say, run: Run) -> str:
    """The path of a session with two turns. The first turn uses a tool; the session is at tick 4."""
    session_id = ""
    for text in ("what is 12*7+5?", "hello"):
        session_id = say(text)["session_id"]
        run(session_id)
    return f"/v1/sessions/{session_id}"


def _messages(client: TestClient, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"{path}/messages").json()
    return found


def _texts(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in messages]


def test_a_fork_is_used_like_any_session(client: TestClient, say: Say, run: Run, talked: str) -> None:
    """A request for a fork gets 201 with the fork's id. The fork can be read, listed and continued like any session."""
    made = client.post(f"{talked}/fork", json={"tick": 3})
    assert made.status_code == 201
    Forked.model_validate(made.json())
    forked = made.json()["session_id"]
    path = f"/v1/sessions/{forked}"

    whole, copied = _messages(client, talked), _messages(client, path)
    assert _texts(copied) == _texts(whole)[:4]
    assert [each["seq"] for each in copied] == [1, 2, 3, 4]
    assert client.get(f"/v1/turns/{copied[0]['turn_id']}").json()["session_id"] == forked
    session = client.get(path).json()
    Session.model_validate(session)
    assert (session["state"], session["turn_count"], session["message_count"]) == ("active", 1, 4)
    assert forked in [each["session_id"] for each in client.get("/v1/sessions?user_id=ann").json()]

    assert say("hello there", session_id=forked)["session_id"] == forked
    run(forked)
    assert len(_messages(client, path)) == 6
    assert _messages(client, talked) == whole
    assert f"/v1/sessions/{say('hello')['session_id']}" == talked


@pytest.mark.parametrize("content", [b"", b" \n", b"{}", b'{"tick": null}'])
def test_without_a_tick_all_settled_turns_are_copied(client: TestClient, talked: str, content: bytes) -> None:
    """The body and its member `tick` are optional. Without `tick`, a fork copies all settled turns."""
    made = client.post(f"{talked}/fork", content=content)
    assert made.status_code == 201
    assert _texts(_messages(client, f"/v1/sessions/{made.json()['session_id']}")) == _texts(_messages(client, talked))


BODIES: dict[str, tuple[bytes, int, str]] = {
    "a future tick": (b'{"tick": 5}', 409, "CONFLICT"),
    "a tick of 40 digits": (b'{"tick": ' + b"9" * 40 + b"}", 409, "CONFLICT"),
    "a tick at which nothing was settled": (b'{"tick": 1}', 409, "CONFLICT"),
    "tick 0": (b'{"tick": 0}', 409, "CONFLICT"),
    "a tick below 0": (b'{"tick": -1}', 400, "INVALID_REQUEST"),
    "text": (b'{"tick": "3"}', 400, "INVALID_REQUEST"),
    "a fraction": (b'{"tick": 3.5}', 400, "INVALID_REQUEST"),
    "true": (b'{"tick": true}', 400, "INVALID_REQUEST"),
    "NaN": (b'{"tick": NaN}', 400, "INVALID_REQUEST"),
    "another member": (b'{"tick": 3, "to": "x"}', 400, "INVALID_REQUEST"),
    "an array": (b"[3]", 400, "INVALID_REQUEST"),
    "malformed JSON": (b'{"tick": ', 400, "INVALID_REQUEST"),
    "not UTF-8": (b"\xff", 400, "INVALID_REQUEST"),
    "too many bytes": (json.dumps({"tick": "x" * 2**20}).encode(), 413, "TOO_LARGE"),
}


@pytest.mark.long
def test_a_bad_fork_is_refused_and_nothing_is_written(client: TestClient, talked: str, rows: Rows) -> None:
    """An invalid request for a fork is refused with a code and a message. The gateway writes no rows."""
    before = rows()
    for name, (content, status, code) in BODIES.items():
        try:
            refused(client.post(f"{talked}/fork", content=content), status, code)
            assert rows() == before
        except AssertionError as error:
            error.add_note(f"the body was {name}")
            raise
    refused(client.post(f"/v1/sessions/{uuid4()}/fork"), 404, "NOT_FOUND")
    refused(client.post("/v1/sessions/none/fork"), 404, "NOT_FOUND")
    refused(client.get(f"{talked}/fork"), 405, "INVALID_REQUEST")
    assert rows() == before


@pytest.mark.parametrize("tick", ["1", 1.5, True, [], {}])
def test_a_tick_is_a_whole_number(tick: object) -> None:
    """A tick must be an integer. Text, fractions, booleans, arrays and objects are refused."""
    with pytest.raises(ValidationError, match="tick"):
        ForkSession.model_validate({"tick": tick})


def test_a_tick_may_be_left_out() -> None:
    """The tick may be missing or `null`. The number 7.0 counts as 7."""
    given: list[dict[str, Any]] = [{}, {"tick": None}, {"tick": 7}, {"tick": 7.0}]

    assert [ForkSession.model_validate(each).tick for each in given] == [None, None, 7, 7]


def test_a_fork_needs_a_key(runtime: Runtime, talked: str, rows: Rows) -> None:
    """Without a valid key, a request for a fork is refused. The gateway writes no rows."""
    settings = runtime.settings.model_copy(update={"api_keys": (SecretStr(SERVICE_KEY),)})
    before = rows()
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as guarded:
        refused(guarded.post(f"{talked}/fork"), 401, "UNAUTHORIZED")
        refused(guarded.post(f"{talked}/fork", headers={"Authorization": "Bearer other"}), 401, "UNAUTHORIZED")
        assert rows() == before
        assert guarded.post(f"{talked}/fork", headers={"Authorization": f"Bearer {SERVICE_KEY}"}).status_code == 201


@pytest.mark.long
def test_the_document_describes_a_fork(client: TestClient) -> None:
    """In the OpenAPI document, the fork route has an optional body and a 201 response."""
    described = client.get("/openapi.json").json()["paths"]["/v1/sessions/{session_id}/fork"]["post"]
    assert described["requestBody"].get("required", False) is False
    assert "201" in described["responses"]


def test_forks_are_limited_and_count_as_messages(runtime: Runtime, say: Say, run: Run, talked: str) -> None:
    """A fork copies a whole transcript, so a user may not make any number of them."""
    guard = runtime.settings.guard.model_copy(update={"open_forks": 2, "per_minute": 5})
    settings = runtime.settings.model_copy(update={"guard": guard})
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as client:
        first, second = (client.post(f"{talked}/fork", json={}) for _ in range(2))  # with two messages: 4 of 5
        assert (first.status_code, second.status_code) == (201, 201)
        full = client.post(f"{talked}/fork", json={})
        assert (full.status_code, "PERDURE_GUARD__OPEN_FORKS" in full.json()["detail"]) == (409, True)
        ended = client.post(f"/v1/sessions/{first.json()['session_id']}/end", json={})
        assert ended.status_code == 202
        assert client.post("/v1/messages", json={"user_id": "ann", "text": "the fifth"}).status_code == 202
        assert client.post(f"{talked}/fork", json={}).status_code == 429
