"""The headers, body or token of a request to the OpenAI routes determine the request's user and conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from starlette.testclient import TestClient

from perdure.access.tenants import user_key
from perdure.agents import Agent, Agents
from perdure.channels.http.app import create_app
from perdure.channels.http.auth import Keys
from perdure.runtime import Runtime
from perdure.settings import Settings
from tests.channels.conftest import BASE_URL, SERVICE_KEY

SETTINGS: dict[str, Any] = {"api_keys": SERVICE_KEY, "secret_key": "the secret of these tests' tokens"}
OWN = {"X-Perdure-User": "bea", "X-Perdure-Conversation": "own"}
_LABELS = ("id", "model", "conversation", "instructions", "background")
WEBUI = {"X-OpenWebUI-User-Id": "cleo", "X-OpenWebUI-Chat-Id": "chat-1"}


@pytest.fixture
def agents() -> Agents:
    """Two agents."""
    return Agents([Agent("assistant", "Answer."), Agent("other", "Answer otherwise.")])


@pytest.fixture
def client(runtime: Runtime) -> Iterator[TestClient]:
    """A client of a gateway that has a service key."""
    settings = Settings(_env_file=None, **SETTINGS)
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as made:
        yield made


def _post(client: TestClient, key: str, headers: Mapping[str, str], **body: Any) -> Any:
    """Request a response in the background, so that the test needs no worker."""
    sent = {"model": "assistant", "input": "hello", "background": True, **body}
    return client.post("/v1/responses", json=sent, headers={"Authorization": f"Bearer {key}", **headers})


def _where(client: TestClient, user: str) -> list[str | None]:
    answer = client.get(f"/v1/sessions?user_id={user}", headers={"Authorization": f"Bearer {SERVICE_KEY}"})
    return [each["conversation"] for each in answer.json()]


@pytest.mark.parametrize(
    ("headers", "body", "user", "conversation"),
    [
        ({**OWN, **WEBUI}, {"user": "ann", "prompt_cache_key": "cached"}, "bea", "own"),
        (WEBUI, {"user": "ann", "prompt_cache_key": "cached"}, "ann", "cached"),
        (WEBUI, {"safety_identifier": "dora", "user": "ann"}, "dora", "chat-1"),
        (WEBUI, {}, "cleo", "chat-1"),
        (WEBUI, {"conversation": "named"}, "cleo", "named"),
        ({}, {"user": "ann"}, "ann", None),
        ({}, {"user": "ann", "metadata": {"user_id": "zoe"}}, "ann", None),
        (WEBUI, {"metadata": {"user_id": "zoe", "page": "/cart"}}, "zoe", "chat-1"),
        ({"X-Perdure-User": " "}, {"user": "ann"}, "ann", None),
    ],
)
def test_the_order_of_precedence(
    client: TestClient, headers: dict[str, str], body: dict[str, Any], user: str, conversation: str | None
) -> None:
    """`X-Perdure-*` headers take precedence over the body. The body takes precedence over Open WebUI's headers."""
    assert _post(client, SERVICE_KEY, headers, **body).status_code == 200
    assert _where(client, user) == [conversation]


def test_a_header_is_utf_8(client: TestClient) -> None:
    """The gateway reads the values of headers as UTF-8."""
    headers = [(b"Authorization", f"Bearer {SERVICE_KEY}".encode()), (b"X-Perdure-User", "ä".encode())]
    body = {"model": "assistant", "input": "hello", "background": True}
    answer = client.post("/v1/responses", json=body, headers=headers)
    assert answer.status_code == 200
    assert _where(client, "ä") == [None]


def test_a_template_that_was_not_filled_in_is_refused(client: TestClient) -> None:
    """A header with an unfilled placeholder is refused. Otherwise, all users of the front end would share a user id."""
    answer = _post(client, SERVICE_KEY, {"X-Perdure-User": "{{LIBRECHAT_USER_ID}}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-perdure-user")


def test_a_token_is_its_user_whatever_a_front_end_forwards(client: TestClient, runtime: Runtime) -> None:
    """A user's token determines the user. Open WebUI's headers are ignored. A request for another user is refused."""
    settings = Settings(_env_file=None, **SETTINGS)
    token = Keys(settings, runtime.clock).tokens.mint(user_key(None, "ann"), 60)[0]
    assert _post(client, token, WEBUI).status_code == 200
    assert (_where(client, "ann"), _where(client, "cleo")) == ([None], [])
    assert _post(client, token, {"X-Perdure-User": "bea"}).status_code == 404
    assert _where(client, "bea") == []


def test_an_idempotency_key_is_bounded(client: TestClient) -> None:
    """The key becomes the `message_id`: one that is too long or cannot be stored is refused before it is looked up."""
    user = {"X-Perdure-User": "bea"}
    assert _post(client, SERVICE_KEY, {**user, "Idempotency-Key": "k" * 200}).status_code == 200
    for key in ("k" * 201, "k" * 3_000, "k\x00"):
        try:
            answer = _post(client, SERVICE_KEY, {**user, "Idempotency-Key": key})
        except ValueError:  # the client itself refuses NUL in a header
            continue
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key"), len(key)


def test_a_repeated_request_gets_the_labels_of_its_turn(http: TestClient) -> None:
    """A key that is used again finds its turn, with the turn's agent, conversation and settings."""
    key = {"Idempotency-Key": "order-1"}
    sent = {"model": "assistant", "input": "hello", "user": "ann", "conversation": "one", "instructions": "Be brief."}
    other = {**sent, "model": "other", "conversation": "two", "instructions": "Be kind."}
    answer = http.post("/v1/responses", json=sent, headers=key)
    first = answer.json()
    assert answer.status_code == 200, answer.text
    for again in (
        http.post("/v1/responses", json=other, headers=key).json(),
        http.post("/v1/responses", json={**other, "background": True}, headers=key).json(),
        http.get(f"/v1/responses/{first['id']}").json(),
    ):
        assert {name: again[name] for name in _LABELS} == {name: first[name] for name in _LABELS}
    assert (first["model"], first["conversation"]) == ("assistant", {"id": "one"})
    chat = {"model": "other", "user": "ann", "messages": [{"role": "user", "content": "hello"}]}
    assert http.post("/v1/chat/completions", json=chat, headers=key).json()["model"] == "assistant"
    streamed = http.post("/v1/chat/completions", json={**chat, "stream": True}, headers=key).text
    assert '"model":"assistant"' in streamed
    assert '"model":"other"' not in streamed


@pytest.mark.parametrize("header", ["X-Perdure-User", "X-Perdure-Conversation", "Idempotency-Key"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_no_header_is_too_long_for_the_database(client: TestClient, header: str, path: str) -> None:
    """A header of any length gets an answer that names it, and no internal error."""
    headers = {"Authorization": f"Bearer {SERVICE_KEY}", "X-Perdure-User": "bea", header: "é" * 3_000}
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    body = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}], "input": "hello"}
    answer = client.post(path, json=body, headers=sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "body",
    [{"conversation": 5}, {"conversation": ""}, {"conversation": {"id": []}}, {"conversation": {}}, {"input": 5}],
)
def test_an_error_names_the_member_and_no_object_of_python(client: TestClient, body: dict[str, Any]) -> None:
    """Pydantic names the tried types of a union in an error's path, addresses of functions included."""
    answer = _post(client, SERVICE_KEY, {"X-Perdure-User": "bea"}, **body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert message.startswith(next(iter(body)))
    assert not [each for each in ("0x", "function", "[", "Ref") if each in message], message


def test_metadata_reaches_the_turn(client: TestClient) -> None:
    """The turn has the request's `metadata`, and the response returns it. Metadata that is too long is refused."""
    sent = _post(client, SERVICE_KEY, {}, user="ann", metadata={"page": "/cart"}).json()
    assert sent["metadata"] == {"page": "/cart"}
    turn = f"/v1/turns/{UUID(sent['id'].removeprefix('resp_'))}"
    headers = {"Authorization": f"Bearer {SERVICE_KEY}"}
    assert client.get(turn, headers=headers).json()["metadata"] == {"page": "/cart"}
    refused = _post(client, SERVICE_KEY, {}, user="ann", metadata={"page": "x" * 20_000})
    assert (refused.status_code, "metadata" in refused.json()["error"]["message"]) == (400, True)


def test_a_service_names_its_user(client: TestClient) -> None:
    """A service key acts for any user, so each request names one; the error says which member is missing."""
    headers = {"Authorization": f"Bearer {SERVICE_KEY}"}
    for path, body in (("messages", {"text": "hi"}), ("memory/search", {"query": "hi"})):
        answer = client.post(f"/v1/{path}", json=body, headers=headers)
        assert (answer.status_code, answer.json()["detail"]) == (400, "user_id: is missing.")
