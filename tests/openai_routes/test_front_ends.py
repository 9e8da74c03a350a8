"""What a first request needs, what Open WebUI sends, and what happens if a client closes its connection."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import openai
import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from perdure.access.tenants import UserKey
from perdure.channels.http.openai import asked
from perdure.channels.http.openai.repeats import CHANNEL, RepeatableRequest, accept_once
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.runtime import Runtime
from perdure.turns.cancel import cancel
from perdure.turns.inbox.incoming import Incoming
from tests.turns.harness import until
from tests.turns.scripted import Scripted, says

WEBUI = {"X-OpenWebUI-User-Id": "cleo", "X-OpenWebUI-Chat-Id": "chat-1"}
ITS_TOOL = {"type": "function", "function": {"name": "get_current_timestamp", "parameters": {}}}
BODY: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}]}


def _rows(runtime: Runtime, statement: str) -> list[Any]:
    with runtime.database.engine.connect() as connection:
        return list(connection.execute(text(statement)))


def test_a_first_request_needs_nothing(sdk: openai.OpenAI, running: Runtime) -> None:
    """On a gateway without keys, the user is `local`; metadata names another one, since some clients drop `user`."""
    made = sdk.chat.completions.create(**BODY)
    assert made.choices[0].message.content == "ok"
    sdk.chat.completions.create(**BODY, metadata={"user_id": "ann"})
    assert sdk.responses.create(model="assistant", input="hello").output_text == "ok"
    users = [row.user_id for row in _rows(running, "SELECT user_id FROM turns ORDER BY turn_id")]
    assert users == ["local", "ann", "local"]


def test_open_webui_is_answered(
    http: TestClient, model: Scripted, running: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tools and its own members are ignored, which is logged once. From others, such members are refused."""
    asked._note_ignored_tools.cache_clear()
    body = {**BODY, "stream": True, "tools": [ITS_TOOL], "tool_choice": "auto", "session_id": "x", "features": {"a": 1}}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = http.post("/v1/chat/completions", json=body, headers=WEBUI)
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    assert len([each for each in caplog.records if "Open WebUI" in each.message]) == 1
    assert "get_current_timestamp" not in {each.name for request in model.requests for each in request.tools}
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    [row] = _rows(running, "SELECT DISTINCT user_id FROM turns")
    assert row.user_id == "cleo"


def test_a_chat_with_documents_is_a_turn(http: TestClient, running: Runtime) -> None:
    """Retrieved documents begin with `### Task:`, as requests for a title do: only a header marks those."""
    said = "### Task:\nRespond to the user query using the provided context, incorporating inline citations."
    http.post("/v1/chat/completions", json={**BODY, "messages": [{"role": "user", "content": said}]}, headers=WEBUI)
    assert len(_rows(running, "SELECT FROM turns")) == 1


@pytest.mark.parametrize("chat", ["temporary:socket", "local:socket"])
def test_temporary_chats_share_no_conversation(http: TestClient, running: Runtime, chat: str) -> None:
    """All temporary chats of a page have one id. They are told apart by their first message, and not remembered."""
    temporary = {**WEBUI, "X-OpenWebUI-Chat-Id": chat}
    for first in ("one", "two"):
        history = [{"role": "user", "content": first}]
        for _ in range(2):
            http.post("/v1/chat/completions", json={**BODY, "messages": history}, headers=temporary)
            history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    counts = _rows(running, "SELECT count(*) AS turns FROM turns GROUP BY session_id")
    assert [row.turns for row in counts] == [2, 2]
    assert _rows(running, "SELECT FROM message_words") == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("headers", "cancels"),
    [({}, False), ({"X-Perdure-On-Disconnect": "cancel"}, True), (WEBUI, True),
     ({**WEBUI, "X-Perdure-On-Disconnect": "continue"}, False)],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(  # noqa: PLR0917 (fixtures and parameters)
    http: TestClient, model: Scripted, running: Runtime, headers: dict[str, str], cancels: bool, stream: bool
) -> None:
    """The turn goes on, unless the client or its front end says that it is cancelled."""
    begun, left = threading.Event(), threading.Event()

    def slow(request: ModelRequest, call: ModelCall) -> ModelReply:
        call.delta("Half")
        begun.set()
        left.wait(20)
        return says("Half an answer.")

    model.lines = [slow]
    assert http.portal is not None
    http.portal.call(_leave, http.app, {**BODY, "stream": stream}, headers, begun)
    if cancels:
        until(lambda: _rows(running, "SELECT FROM turns WHERE cancel_requested_at IS NOT NULL"), "it is cancelled")
    left.set()
    for thread in running.wake.threads:  # type: ignore[attr-defined]
        thread.join(20)
    [row] = _rows(running, "SELECT cancel_requested_at FROM turns WHERE settled_at IS NOT NULL")
    assert (row.cancel_requested_at is not None) == cancels


def test_a_stopped_answer_can_be_made_again(runtime: Runtime) -> None:
    """The same request after a stop gets another turn, and not the error of the cancelled one."""
    message = Incoming(user=UserKey("ana"), text="hello", channel=CHANNEL)
    request = RepeatableRequest.of(message, BODY["messages"], None, is_retry=False)
    found = []
    for _ in range(5):
        found.append(accept_once(runtime, request).turn_id)
        assert accept_once(runtime, request).turn_id == found[-1]  # until it is stopped, a repeated request finds it
        cancel(runtime, found[-1])
    assert len(set(found)) == 5


async def _leave(app: Any, body: dict[str, Any], headers: dict[str, str], begun: threading.Event) -> None:
    """Send a request, and close the connection when its model has begun to answer."""
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if received:
            return received.pop()
        await asyncio.to_thread(begun.wait, 20)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Discard the response."""

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
        "scheme": "http", "server": ("127.0.0.1", 8080), "client": ("127.0.0.1", 1), "state": {}, "extensions": {},
        "headers": [(b"host", b"127.0.0.1:8080"),
                    *((name.lower().encode(), value.encode()) for name, value in headers.items())],
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 20)


def test_an_unknown_word_is_refused(http: TestClient) -> None:
    """The header's values are `cancel` and `continue`."""
    answer = http.post("/v1/chat/completions", json=BODY, headers={"X-Perdure-On-Disconnect": "stop"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-perdure-on-disconnect")
