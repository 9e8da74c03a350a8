"""The WebSocket: authentication by the first frame, origins, limits, and the events of turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from starlette.testclient import TestClient, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from perdure.access.tenants import user_key
from perdure.channels.http.app import create_app
from perdure.channels.http.auth import Keys
from perdure.channels.http.stream import websocket
from perdure.clock import MovedClock
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.turns.run.loop import Runner
from tests.channels.conftest import ADMIN_KEY, BASE_URL, SERVICE_KEY

SOCKET = "ws://127.0.0.1:8080/v1/ws"
KEYS = {"api_keys": SERVICE_KEY, "admin_keys": ADMIN_KEY, "secret_key": "the secret of these tests' tokens"}


@pytest.fixture
def guarded(runtime: Runtime) -> Iterator[TestClient]:
    """A client of a gateway that requires a key or token."""
    settings = Settings(_env_file=None, **KEYS)  # type: ignore[arg-type]
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as made:
        yield made


def _token(runtime: Runtime, user: str) -> str:
    settings = Settings(_env_file=None, **KEYS)  # type: ignore[arg-type]
    return Keys(settings, runtime.clock).tokens.mint(user_key(None, user), 60)[0]


def _ask(socket: WebSocketTestSession, kind: str, **members: Any) -> dict[str, Any]:
    """Send one frame; returns its answer. Events that arrive before the answer are dropped."""
    ref = str(uuid4())
    socket.send_json({"type": kind, "ref": ref, **members})
    while True:
        answer: dict[str, Any] = socket.receive_json()
        if answer.get("ref") == ref:
            return answer


def test_a_message_has_the_fields_of_the_route(client: TestClient) -> None:
    """`send` takes what `POST /v1/messages` takes, except the channel and the receiver of the reply."""
    given: dict[str, Any] = {
        "user_id": "ann", "parts": [{"type": "text", "text": "hi"}], "message_id": "m1", "conversation": "c",
        "session_id": None, "agent": None, "priority": 4, "on_busy": "enqueue", "remember": False,
        "metadata": {"page": "1"},
    }  # fmt: skip
    schema = client.get("/openapi.json").json()["components"]["schemas"]["Incoming"]["properties"]
    assert {*given, "text", "channel", "reply_to"} == schema.keys()
    with client.websocket_connect(SOCKET) as socket:
        socket.send_json({"type": "auth"})
        socket.receive_json()
        assert _ask(socket, "send", **given)["type"] == "ok"
        assert _ask(socket, "send", user_id="ann", text="hi", parts=None)["type"] == "ok"
        for name in ("channel", "reply_to", "unknown"):
            refused = _ask(socket, "send", user_id="ann", text="hi", **{name: "x"})
            assert (refused["type"], refused["message"].startswith(f"{name}: accepted fields")) == ("error", True)


def test_a_message_and_its_events_over_one_connection(client: TestClient, runtime: Runtime) -> None:
    """If no keys are configured, a loopback client needs no token in its `auth` frame.

    The client sends messages and receives their events over one connection.
    """
    with client.websocket_connect(SOCKET) as socket:
        socket.send_json({"type": "auth"})
        assert socket.receive_json() == {"type": "ready", "user_id": None}
        sent = _ask(socket, "send", user_id="ann", text="what is 12*7?", conversation="sums", message_id="m1")
        assert (sent["type"], sent["duplicate"]) == ("ok", False)
        Runner(runtime, "test").run(sent["session_id"])
        events: list[dict[str, Any]] = []
        while not events or events[-1]["event"] != "done":
            frame = socket.receive_json()
            assert (frame["type"], frame["turn_id"]) == ("event", sent["turn_id"])
            events.append(frame)
        assert [each["data"]["role"] for each in events if each["event"] == "message"][-1] == "assistant"
        assert events[-1]["data"]["reply"]["text"] == "12*7 = 84."
        assert _ask(socket, "send", user_id="ann", text="what is 12*7?", message_id="m1", conversation="sums")[
            "duplicate"
        ]
        last = next(each["id"] for each in events if each["event"] == "message")
        assert _ask(socket, "follow", turn_id=sent["turn_id"], last_event_id=last)["type"] == "ok"


@pytest.mark.parametrize(
    "first", [{"type": "auth"}, {"type": "auth", "token": "wrong"}, {"type": "send", "text": "x"}, "no JSON", "[]"]
)
def test_no_valid_token_no_connection(guarded: TestClient, first: Any) -> None:
    """If the first frame has no valid token, the gateway closes the connection without an answer."""
    with guarded.websocket_connect(SOCKET) as socket:
        socket.send_text(first if isinstance(first, str) else json.dumps(first))
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
    assert closed.value.code == websocket.UNAUTHORIZED


def test_a_silent_client_is_closed(guarded: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway closes a connection on which no frame arrives within `AUTH_S` seconds."""
    monkeypatch.setattr(websocket, "AUTH_S", 0.05)
    with guarded.websocket_connect(SOCKET) as socket, pytest.raises(WebSocketDisconnect) as closed:
        socket.receive_json()
    assert closed.value.code == websocket.LATE


def test_a_token_reaches_its_user_only(guarded: TestClient, runtime: Runtime) -> None:
    """A request about another user's turn gets the same error as one about an unknown turn.

    A token cannot be used to send messages as another user.
    """
    headers = {"Authorization": f"Bearer {SERVICE_KEY}"}
    bea = guarded.post("/v1/messages", json={"user_id": "bea", "text": "secret"}, headers=headers).json()
    with guarded.websocket_connect(SOCKET) as socket:
        socket.send_json({"type": "auth", "token": _token(runtime, "ann")})
        assert socket.receive_json()["user_id"] == "ann"
        for kind in ("follow", "cancel", "approve", "unfollow"):
            theirs = _ask(socket, kind, turn_id=bea["turn_id"], call_id="c")
            nothings = _ask(socket, kind, turn_id=str(uuid4()), call_id="c")
            assert (theirs["code"], theirs["message"]) == (nothings["code"], nothings["message"])
            assert theirs["code"] == "NOT_FOUND"
        assert _ask(socket, "send", user_id="bea", text="hello")["code"] == "NOT_FOUND"
        assert _ask(socket, "send", text="hello")["type"] == "ok"
    own = guarded.get("/v1/sessions?user_id=ann", headers=headers).json()
    assert [each["user_id"] for each in own] == ["ann"]


def test_what_an_admin_key_does_is_recorded(guarded: TestClient) -> None:
    """As over HTTP: an action has one record, also if it is refused; those of other keys have none."""
    turn_ids = []
    for key in (SERVICE_KEY, ADMIN_KEY):
        with guarded.websocket_connect(SOCKET) as socket:
            socket.send_json({"type": "auth", "token": key})
            socket.receive_json()
            turn_ids.append(_ask(socket, "send", user_id="ann", text=key)["turn_id"])
            assert _ask(socket, "approve", turn_id=turn_ids[-1], call_id="c")["type"] == "error"
            assert _ask(socket, "cancel", turn_id=turn_ids[-1])["type"] == "ok"
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    recorded = guarded.get("/v1/audit", headers=headers).json()
    assert [(each["action"], each["target"], each["outcome"], each["note"]) for each in recorded] == [
        ("turns.cancel", turn_ids[1], "done", None),
        ("turns.decide", turn_ids[1], "NOT_FOUND", "approve c"),
    ]


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:9999", "null"])
def test_another_origin_is_refused(client: TestClient, origin: str) -> None:
    """Connections from pages of other origins are refused, because browsers let any page connect to loopback."""
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(SOCKET, headers={"origin": origin}):
        pass


def test_invalid_frames_are_answered(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid frame is answered with an error, and the connection continues."""
    monkeypatch.setattr(websocket, "MOST_FOLLOWED", 1)
    with client.websocket_connect(SOCKET, headers={"origin": BASE_URL}) as socket:
        socket.send_json({"type": "auth"})
        socket.receive_json()
        for text in ("x", "[]", "{}", '{"type": 7}', '{"type": "dance"}', '{"type": "follow", "turn_id": "x"}'):
            socket.send_text(text)
            assert socket.receive_json()["type"] == "error"
        assert _ask(socket, "send", user_id="ann", text=" ")["code"] == "INVALID_REQUEST"
        for unknown in ("reply_to", "converstaion"):
            refused = _ask(socket, "send", user_id="ann", text="one", **{unknown: "x"})
            assert (refused["code"], refused["message"].partition(":")[0]) == ("INVALID_REQUEST", unknown)
        first = _ask(socket, "send", user_id="ann", text="one")
        assert _ask(socket, "follow", turn_id=first["turn_id"], last_event_id="nonsense")["code"] == "INVALID_REQUEST"
        assert _ask(socket, "send", user_id="ann", text="two")["code"] == "CONFLICT"
        assert _ask(socket, "unfollow", turn_id=first["turn_id"])["type"] == "ok"
        assert _ask(socket, "cancel", turn_id=first["turn_id"])["type"] == "ok"


def test_a_binary_frame_is_an_invalid_one(client: TestClient, guarded: TestClient) -> None:
    """A binary frame closes an unauthenticated connection. On an authenticated connection, it gets an error."""
    with guarded.websocket_connect(SOCKET) as socket:
        socket.send_bytes(b"{}")
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
    assert closed.value.code == websocket.UNAUTHORIZED
    with client.websocket_connect(SOCKET) as socket:
        socket.send_json({"type": "auth"})
        socket.receive_json()
        socket.send_bytes(b"{}")
        assert socket.receive_json()["code"] == "INVALID_REQUEST"


def _events_to_the_end(socket: WebSocketTestSession) -> None:
    while True:
        assert socket.receive_json()["type"] == "event"


def test_an_expired_token_ends_the_connection(guarded: TestClient, runtime: Runtime, clock: MovedClock) -> None:
    """After the token has expired, the gateway closes the connection at the client's next frame."""
    with guarded.websocket_connect(SOCKET) as socket:
        socket.send_json({"type": "auth", "token": _token(runtime, "ann")})
        assert socket.receive_json()["type"] == "ready"
        assert _ask(socket, "send", text="hello")["type"] == "ok"
        clock.advance(timedelta(seconds=61))
        socket.send_json({"type": "send", "text": "hello again"})
        with pytest.raises(WebSocketDisconnect) as closed:
            _events_to_the_end(socket)
    assert closed.value.code == websocket.UNAUTHORIZED
