"""A caller with a user of its own need not name the user: under `authenticate`, and with a user token."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.channels.test_mounted import shop

__all__ = ["shop"]

LATER = "2099-01-01T09:00:00+00:00"

REQUESTS: list[tuple[str, str, dict[str, Any] | None, int]] = [
    ("POST", "/v1/messages", {"text": "hello"}, 202),
    ("POST", "/v1/messages", {"text": "hello", "user_id": None, "conversation": "a"}, 202),
    ("POST", "/v1/memory/search", {"query": "hello"}, 200),
    ("POST", "/v1/schedules", {"text": "Wake up.", "at": LATER}, 201),
    ("GET", "/v1/schedules", None, 200),
    ("GET", "/v1/sessions", None, 200),
    ("GET", "/v1/conversations", None, 200),
    ("GET", "/v1/links", None, 200),
    ("DELETE", "/v1/links?channel=telegram&external_id=4711", None, 204),
    ("GET", "/v1/casebank/search?q=hello", None, 200),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}, 200),
    ("POST", "/v1/responses", {"input": "hi", "background": True}, 200),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"), REQUESTS, ids=[f"{number} {each[1]}" for number, each in enumerate(REQUESTS)]
)
def test_a_user_need_not_be_named(
    shop: TestClient, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    """The request concerns the caller's user. Naming another user is refused as before."""
    shop.cookies.set("session", "ana")
    if path == "/v1/chat/completions":
        body = {**(body or {}), "stream": True, "messages": [{"role": "assistant", "content": "no turn"}]}
        status = 400  # a turn needs a worker: the request gets as far as its messages
    answer = shop.request(method, f"/agents{path}", json=body)
    assert answer.status_code == status, answer.text
    assert "user" not in answer.text or status < 400 or "messages" in answer.text
    if body is not None and "text" in body:
        assert shop.request(method, f"/agents{path}", json={**body, "user_id": "ben"}).status_code == 404


def test_the_message_belongs_to_the_callers_user(shop: TestClient) -> None:
    """The user of the message and of the schedule is the caller's, and no other user sees them."""
    shop.cookies.set("session", "ana")
    sent = shop.post("/agents/v1/messages", json={"text": "hello", "metadata": {"page": "/cart"}}).json()
    shop.post("/agents/v1/schedules", json={"text": "Wake up.", "at": LATER})
    assert [each["user_id"] for each in shop.get("/agents/v1/sessions").json()] == ["ana"]
    assert [each["user_id"] for each in shop.get("/agents/v1/schedules").json()] == ["ana"]
    assert shop.get(f"/agents/v1/turns/{sent['turn_id']}").json()["metadata"] == {"page": "/cart"}
    with shop.websocket_connect("/agents/v1/ws") as socket:
        socket.receive_json()
        socket.send_json({"type": "send", "ref": 1, "text": "hello", "conversation": "b"})
        assert socket.receive_json()["type"] == "ok"
    shop.cookies.set("session", "ben")
    assert shop.get("/agents/v1/sessions").json() == []
    assert shop.get("/agents/v1/schedules").json() == []
