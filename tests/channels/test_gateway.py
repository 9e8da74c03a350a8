"""The ids, status codes and response formats of the HTTP routes, on which other programs rely."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import ANY
from uuid import UUID, uuid4

import pytest
from alembic import command
from pydantic import TypeAdapter
from sqlalchemy.engine import make_url
from starlette.testclient import TestClient

from perdure.channels.http import dependencies
from perdure.channels.http.app import create_app
from perdure.channels.http.body import MAX_BODY_BYTES
from perdure.channels.http.parameters import parse_id
from perdure.channels.http.schemas.sessions import Message, Session
from perdure.channels.http.schemas.turns import Accepted, Turn
from perdure.database.engine import Database, Statement
from perdure.database.migrate import config
from perdure.errors import Unavailable
from perdure.resilience.kill_reports import Kill
from perdure.runtime import Runtime
from perdure.turns.reading import read_turn
from tests.channels.conftest import BASE_URL
from tests.conftest import RecordingWaker

Say = Callable[..., dict[str, Any]]
Run = Callable[[str], None]


def test_a_message_is_accepted_and_a_worker_woken(client: TestClient, waker: RecordingWaker) -> None:
    """An accepted message gets 202 with the ids of the turn and the session, and wakes a worker."""
    response = client.post("/v1/messages", json={"user_id": "ann", "text": "hello"})
    answer = response.json()

    assert response.status_code == 202
    assert answer.keys() == {"turn_id", "session_id", "seq", "status", "duplicate"}
    assert (answer["seq"], answer["status"], answer["duplicate"]) == (1, "accepted", False)
    assert [str(session) for session in waker.sessions] == [answer["session_id"]]


def test_a_message_is_accepted_while_the_broker_is_unavailable(say: Say, waker: RecordingWaker) -> None:
    """A message is accepted while the broker is unavailable, because a sweep later finds the message in PostgreSQL."""
    waker.away = True

    assert say()["status"] == "accepted"


def test_a_repeated_message_gets_the_same_response(client: TestClient) -> None:
    """A repeated request gets 200, the same ids and `"duplicate": true`."""
    message = {"user_id": "ann", "text": "hello", "message_id": "m1"}
    first, again = client.post("/v1/messages", json=message), client.post("/v1/messages", json=message)

    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json() == {**first.json(), "duplicate": True}


def test_a_turn_is_read_to_its_reply(client: TestClient, say: Say, run: Run) -> None:
    """After a worker has run a turn, the turn is `done` and has the reply."""
    accepted = say("what is 12*7+5?")
    before = client.get(f"/v1/turns/{accepted['turn_id']}").json()
    run(accepted["session_id"])
    after = client.get(f"/v1/turns/{accepted['turn_id']}").json()

    assert (before["status"], before["reply"]) == ("accepted", None)
    assert (after["status"], after["error"]) == ("done", None)
    assert "89" in after["reply"]["text"]


@pytest.mark.parametrize("metadata", [None, {"page": "/cart"}])
def test_a_turn_has_no_members_that_it_lacks(
    client: TestClient, runtime: Runtime, say: Say, run: Run, metadata: dict[str, str] | None
) -> None:
    """A reply has its end, and a turn without metadata has no member for it. Callbacks have the same body."""
    accepted = say("what is 12*7+5?", **({} if metadata is None else {"metadata": metadata}))
    run(accepted["session_id"])
    turn = client.get(f"/v1/turns/{accepted['turn_id']}").json()
    assert turn["reply"] == {"text": ANY, "format": "text", "stop_reason": "stop"}
    assert turn.get("metadata", "absent") == (metadata or "absent")
    assert turn["error"] is turn["waiting_for"] is None
    assert turn == read_turn(runtime.database, UUID(accepted["turn_id"]))
    assert client.post(f"/v1/turns/{accepted['turn_id']}/cancel").json() == turn


def test_answers_have_the_shapes_that_the_document_describes(client: TestClient, say: Say, run: Run) -> None:
    """Responses match the models of the OpenAPI document, even if a route encodes its response without the model."""
    accepted = say("what is 12*7+5?")
    run(accepted["session_id"])
    session = f"/v1/sessions/{accepted['session_id']}"
    messages = client.get(f"{session}/messages").json()

    Accepted.model_validate(accepted)
    Turn.model_validate(client.get(f"/v1/turns/{accepted['turn_id']}").json())
    Session.model_validate(client.get(session).json())
    TypeAdapter(list[Session]).validate_python(client.get("/v1/sessions?user_id=ann").json())
    TypeAdapter(list[Message]).validate_python(messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0].keys() == {"id", "name", "arguments"}


def test_the_transcript_is_read_in_parts(client: TestClient, say: Say, run: Run) -> None:
    """`after` and `limit` page through a transcript. Without them the response has all messages."""
    accepted = say("what is 12*7+5?")
    run(accepted["session_id"])
    url = f"/v1/sessions/{accepted['session_id']}/messages"
    whole = client.get(url).json()

    assert client.get(f"{url}?limit=1").json() == whole[:1]
    assert client.get(f"{url}?after={whole[0]['seq']}").json() == whole[1:]
    assert client.get(f"{url}?after={whole[-1]['seq']}").json() == []


def test_sessions_are_listed_by_user(client: TestClient, say: Say) -> None:
    """A user's list contains no other user's session."""
    mine = say("hello")
    say("hello", user_id="bob")

    listed = client.get("/v1/sessions", params={"user_id": "ann"}).json()

    assert [session["session_id"] for session in listed] == [mine["session_id"]]
    assert len(client.get("/v1/sessions").json()) == 2
    assert len(client.get("/v1/sessions?limit=1").json()) == 1


def test_a_turn_that_has_not_begun_is_cancelled_at_once(client: TestClient, say: Say) -> None:
    """Cancelling a turn that has not begun gets 202, and the turn is `cancelled`. A second request changes nothing."""
    turn = f"/v1/turns/{say()['turn_id']}"

    assert client.post(f"{turn}/cancel").status_code == 202
    assert client.post(f"{turn}/cancel").status_code == 202
    settled = client.get(turn).json()
    assert (settled["status"], settled["reply"], settled["error"]["code"]) == ("cancelled", None, "TURN_CANCELLED")


def test_waiting_answers_as_soon_as_the_turn_is_settled(client: TestClient, say: Say, run: Run) -> None:
    """A wait returns as soon as the turn is settled, not at its timeout."""
    accepted = say()
    began = time.monotonic()
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.append(client.get(f"/v1/turns/{accepted['turn_id']}?wait=60").json())
    )
    waiting.start()
    run(accepted["session_id"])
    waiting.join(timeout=30)

    assert answers[0]["status"] == "done"
    assert time.monotonic() - began < 30


def test_a_wait_that_times_out_returns_the_current_status(client: TestClient, say: Say) -> None:
    """A wait that times out returns the turn's current status."""
    accepted = say()

    assert client.get(f"/v1/turns/{accepted['turn_id']}?wait=0.1").json()["status"] == "accepted"


@pytest.mark.long
def test_a_hundred_may_wait_at_once_and_others_are_still_served(client: TestClient, say: Say) -> None:
    """A hundred waiting requests do not block other requests, because a waiting request occupies no thread."""
    accepted = say()
    url = f"/v1/turns/{accepted['turn_id']}?wait=60"
    answers: list[str] = []
    waiting = [
        threading.Thread(target=lambda: answers.append(client.get(url).json()["status"]), daemon=True)
        for _ in range(100)
    ]
    for each in waiting:
        each.start()

    assert client.get(f"/v1/turns/{accepted['turn_id']}").json()["status"] == "accepted"
    client.post(f"/v1/turns/{accepted['turn_id']}/cancel")
    for each in waiting:
        each.join(timeout=30)
    assert answers == ["cancelled"] * 100


def test_a_draining_gateway_answers_waits(client: TestClient, say: Say) -> None:
    """After the drain has completed, a request does not wait: it gets the turn's current status at once."""
    accepted = say()
    app: Any = client.app
    assert client.portal is not None
    client.portal.call(app.state.gateway.drain, asyncio.Event())

    assert client.get(f"/v1/turns/{accepted['turn_id']}?wait=60").json()["status"] == "accepted"


def test_an_unavailable_database_is_a_503(client: TestClient, runtime: Runtime, monkeypatch: Any) -> None:
    """If the database is unavailable, the response is a 503 with `Retry-After`."""

    def fail(*_: Any) -> None:
        raise Unavailable("The database cannot be reached; please try again.")

    monkeypatch.setattr(runtime.database, "run", fail)
    response = client.post("/v1/messages", json={"user_id": "ann", "text": "hello"})

    assert (response.status_code, response.json()["code"]) == (503, "UNAVAILABLE")
    assert int(response.headers["retry-after"]) >= 1


def test_an_unexpected_error_reveals_nothing(
    client: TestClient, runtime: Runtime, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The details of an unexpected error appear only in the log. The caller gets a general message."""

    def broken(*_: Any) -> None:
        raise RuntimeError("SELECT secret FROM vault")

    monkeypatch.setattr(runtime.database, "run", broken)
    response = client.get("/v1/sessions?user_id=ann")

    assert (response.status_code, response.json()["code"]) == (500, "UNKNOWN")
    assert "secret" not in response.text
    assert "SELECT secret FROM vault" in caplog.text


def test_the_gateway_is_ready_when_both_services_are(client: TestClient) -> None:
    """If PostgreSQL and the broker are available, `/healthz` and `/readyz` succeed."""
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}


def test_the_gateway_is_not_ready_without_a_broker(runtime: Runtime) -> None:
    """If the broker is unavailable, `/readyz` fails with a message that names the broker."""
    with TestClient(create_app(runtime, lambda: False), base_url=BASE_URL) as client:
        response = client.get("/readyz")

    assert (response.status_code, response.json()["code"]) == (503, "UNAVAILABLE")
    assert "broker" in response.json()["detail"]


@pytest.mark.exhaustive
def test_a_service_that_hangs_does_not_hang_the_check(runtime: Runtime) -> None:
    """If the check of the broker hangs, `/readyz` answers 503. Further requests do not start another check."""
    requested, release = [], threading.Event()

    def hangs() -> bool:
        requested.append(1)
        return release.wait(60)

    with TestClient(create_app(runtime, hangs), base_url=BASE_URL) as client:
        statuses = [client.get("/readyz").status_code for _ in range(2)]
        release.set()

    assert statuses == [503, 503]
    assert len(requested) == 1


@pytest.mark.long
def test_a_gateway_is_ready_without_the_list_of_kills(runtime: Runtime) -> None:
    """If reading the list of killed workers hangs, `/readyz` still succeeds, because the list is only informative."""
    release = threading.Event()

    def hangs() -> tuple[Kill, ...]:
        release.wait(60)
        return ()

    with TestClient(create_app(runtime, lambda: True, hangs), base_url=BASE_URL) as client:
        answer = client.get("/readyz")
        release.set()

    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


@pytest.mark.long
def test_the_gateway_is_not_ready_before_the_migration(runtime: Runtime, database_url: str) -> None:
    """Before the migration, `/readyz` fails, so that a new release gets no traffic while the tables are old."""
    command.downgrade(config(database_url), "base")
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        response = client.get("/readyz")

    assert response.status_code == 503
    assert "perdure migrate" in response.json()["detail"]


def test_the_gateway_is_not_ready_without_a_database(runtime: Runtime) -> None:
    """If the database is unavailable, `/readyz` fails and a message is refused with 503."""
    nowhere = Database(make_url("postgresql+psycopg2://x@127.0.0.1:1/x"))
    changed = replace(runtime, database=nowhere)
    with TestClient(create_app(changed, lambda: True), base_url=BASE_URL) as client:
        ready = client.get("/readyz")
        message = client.post("/v1/messages", json={"user_id": "ann", "text": "hello"})

    assert "database" in ready.json()["detail"]
    assert (message.status_code, message.json()["code"]) == (503, "UNAVAILABLE")


@pytest.mark.long
def test_the_document_describes_the_routes_and_loads_nothing_from_elsewhere(client: TestClient) -> None:
    """Every reference in the OpenAPI document resolves.

    FastAPI's documentation pages are not served, because they load scripts from other servers.
    """
    document = client.get("/openapi.json").json()
    named = document["components"]["schemas"]

    assert {"/v1/messages", "/v1/turns/{turn_id}", "/v1/sessions", "/readyz"} <= document["paths"].keys()
    assert {reference.rpartition("/")[2] for reference in _references(document)} <= named.keys()
    assert named["Incoming"]["properties"]["text"]["type"] == "string"
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for child in value.values() for found in _references(child)]
    if isinstance(value, list):
        return [found for child in value for found in _references(child)]
    return []


def test_a_session_is_ended_on_request(client: TestClient, say: Say, run: Run, waker: RecordingWaker) -> None:
    """A request to end a session, with or without a reason, gets 202. The next message begins another session."""
    first = say()
    run(first["session_id"])
    session = f"/v1/sessions/{first['session_id']}"

    requested = client.post(f"{session}/end", json={"reason": "enough"})
    assert (requested.status_code, requested.json()["session_id"]) == (202, first["session_id"])
    assert client.post(f"{session}/end").status_code == 202
    assert waker.endings == [UUID(first["session_id"])] * 2
    assert say("and now")["session_id"] != first["session_id"]
    late = {"user_id": "ann", "text": "x", "session_id": first["session_id"]}
    refused = client.post("/v1/messages", json=late)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")


@pytest.mark.parametrize(
    ("body", "named_member"), [({"reason": 7}, "reason"), ({"reason": "x" * 1_001}, "reason"), ({"why": "x"}, "why")]
)
def test_an_end_with_an_invalid_body_is_refused(
    client: TestClient, say: Say, body: dict[str, Any], named_member: str, waker: RecordingWaker
) -> None:
    """If a request to end a session has an invalid body, the request gets 400 and the session continues."""
    session_id = say()["session_id"]
    refused = client.post(f"/v1/sessions/{session_id}/end", json=body)
    assert refused.status_code == 400
    assert named_member in refused.json()["detail"]
    assert waker.endings == []
    assert say("still")["session_id"] == session_id


def test_ending_an_ended_session_is_refused(client: TestClient, say: Say, run: Run, database: Database) -> None:
    """Ending an ended session gets 409. Ending an unknown session gets 404."""
    session_id = say()["session_id"]
    run(session_id)
    database.run(Statement("tests.ended", "UPDATE sessions SET end_requested_at = now(), ended_at = now()"), {})
    assert client.post(f"/v1/sessions/{session_id}/end").status_code == 409
    assert client.post(f"/v1/sessions/{uuid4()}/end").status_code == 404
    assert client.post("/v1/sessions/none/end").status_code == 404


ANSWERS = [
    ("GET /healthz", b"", 200),
    ("HEAD /healthz", b"", 200),
    ("GET /openapi.json", b"", 200),
    ("GET /v1/sessions", b"", 200),
    ("POST /v1/messages", b'{"user_id": "ann", "text": "hello"}', 202),
    ("POST /v1/messages", b"{", 400),
    ("GET /v1/nowhere", b"", 404),
    ("GET /v1/turns/x", b"", 404),
    ("PUT /v1/messages", b"", 405),
    ("OPTIONS /v1/messages", b"", 405),
    ("POST /v1/memory/search", b" " * (MAX_BODY_BYTES + 1), 413),
    ("GET /v1/sessions/fault", b"", 500),
]


@pytest.mark.parametrize(("request_line", "content", "status"), ANSWERS)
def test_every_answer_carries_the_usual_headers(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, request_line: str, content: bytes, status: int
) -> None:
    """Headers tell browsers not to guess a response's type, frame it, store it or show it to pages of other origins."""
    monkeypatch.setattr(dependencies, "parse_id", _parse_id)
    response = client.request(*request_line.split(), content=content, headers={"Origin": BASE_URL})
    headers = response.headers

    assert response.status_code == status
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert [name for name in headers if name.startswith("access-control-")] == [], (
        "no page of another origin may read the response"
    )
    assert "strict-transport-security" not in headers, (
        "HSTS would bind a browser to HTTPS, which the gateway does not serve"
    )


def test_no_proxy_holds_events_back(client: TestClient, say: Any) -> None:
    """A proxy that compresses, such as the middleware of Express, passes a stream on only when its buffer is full."""
    turn_id = say()["turn_id"]
    assert client.post(f"/v1/turns/{turn_id}/cancel").status_code == 202
    headers = client.get(f"/v1/turns/{turn_id}/events").headers
    assert headers["cache-control"] == "no-store, no-transform"
    assert headers["x-accel-buffering"] == "no"


def _parse_id(text: str, thing: str) -> UUID:
    if text == "fault":
        raise ZeroDivisionError
    return parse_id(text, thing)
