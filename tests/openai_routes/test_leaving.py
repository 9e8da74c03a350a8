"""A client that closes its connection before it has its answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.runtime import Runtime
from tests.openai_routes.connections import Connection
from tests.turns.harness import until
from tests.turns.scripted import Scripted, calls, says

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CANCEL = {"X-Perdure-On-Disconnect": "cancel"}
WEBUI = {"X-OpenWebUI-User-Id": "cleo", "X-OpenWebUI-Chat-Id": "chat-1"}


@tool
def here(number: int) -> str:
    """Count.

    Args:
        number: The number.
    """
    return f"counted {number}"


@pytest.fixture
def agents() -> Agents:
    """An agent with a tool."""
    return Agents([Agent("assistant", "You help.", [here])])


@pytest.fixture
def connect(http: TestClient) -> Iterator[Callable[..., Connection]]:
    """A function that makes a connection to the gateway, which the end of the test closes."""
    made: list[Connection] = []

    def open_connection(*request: Any, **more: Any) -> Connection:
        made.append(Connection(http, *request, **more))
        return made[-1]

    yield open_connection
    for each in made:
        each.abandon()


class Pondering:
    """A line of a model that says nothing until the test ends with `done`."""

    def __init__(self) -> None:
        self.called, self.done = threading.Event(), threading.Event()

    def __call__(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Answer after `done`."""
        self.called.set()
        self.done.wait(20)
        return says("The answer.")


def _body(path: str, *, stream: bool, **more: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"input": "hello"}
    return {"model": "assistant", "stream": stream, **said, **more}


def _turns(runtime: Runtime) -> list[tuple[bool, str]]:
    """Of each turn, whether its cancellation was requested, and its status."""
    with runtime.database.engine.connect() as connection:
        rows = connection.execute(text("SELECT cancel_requested_at, status FROM turns ORDER BY turn_id"))
        return [(row.cancel_requested_at is not None, row.status) for row in rows]


def _join(runtime: Runtime) -> None:
    for thread in runtime.wake.threads:  # type: ignore[attr-defined]
        thread.join(20)


@pytest.mark.parametrize(
    ("path", "headers"), [(CHAT, CANCEL), (CHAT, WEBUI), (RESPONSES, CANCEL)], ids=["chat", "webui", "responses"]
)
def test_a_client_leaves_while_the_model_thinks(
    connect: Callable[..., Connection], model: Scripted, running: Runtime, path: str, headers: dict[str, str]
) -> None:
    """The turn is cancelled before it has any text. The same request then gets another turn, and no error."""
    pondering = Pondering()
    model.lines = [pondering, says("Again.")]
    leaving = connect(path, _body(path, stream=True), headers)
    assert pondering.called.wait(20)
    leaving.close()
    assert leaving.status is None
    until(lambda: _turns(running)[0][0], "the turn is cancelled")
    again = connect(path, _body(path, stream=True), headers)
    until(lambda: len(_turns(running)) == 2, "another turn")
    pondering.done.set()
    assert "Again." in again.read()
    _join(running)
    assert [is_cancelled for is_cancelled, _ in _turns(running)] == [True, False]


@pytest.mark.parametrize("more", [{}, {"background": True}], ids=["by default", "in the background"])
def test_a_turn_goes_on_without_its_client(
    connect: Callable[..., Connection], model: Scripted, running: Runtime, more: dict[str, Any]
) -> None:
    """By default, and in the background whatever the client says."""
    pondering = Pondering()
    model.lines = [pondering]
    leaving = connect(RESPONSES, _body(RESPONSES, stream=True, **more), CANCEL if more else {})
    assert pondering.called.wait(20)
    leaving.close()
    pondering.done.set()
    _join(running)
    assert _turns(running) == [(False, "done")]


def test_a_client_leaves_when_its_stream_begins(
    connect: Callable[..., Connection], model: Scripted, running: Runtime
) -> None:
    """The status is not sent yet, so nothing of the stream's text was asked for: the turn is cancelled all the same."""
    pondering = Pondering()
    step = calls(("here", {"number": 1}))
    model.lines = [ModelReply("Let me see.", step.tool_calls, step.usage, step.model), pondering]
    leaving = connect(CHAT, _body(CHAT, stream=True), CANCEL, is_stalled=True)
    until(leaving.has_begun.is_set, "the response begins")
    leaving.close()
    until(lambda: _turns(running)[0][0], "the turn is cancelled")
    pondering.done.set()


def _both_wait(attending: Counter[UUID]) -> bool:
    return 2 in attending.values()


@pytest.mark.parametrize("stream", [False, True])
def test_another_request_waits_for_the_turn(
    http: TestClient, connect: Callable[..., Connection], model: Scripted, running: Runtime, *, stream: bool
) -> None:
    """A repeated request gets the answer, although the first one's client leaves. The last one to leave cancels."""
    for last_leaves in (False, True):
        pondering = Pondering()
        model.lines = [pondering]
        headers = {**CANCEL, "X-Perdure-Conversation": f"last leaves {last_leaves}"}
        both = [connect(CHAT, _body(CHAT, stream=stream), headers) for _ in range(2)]
        attending = http.app.state.gateway._attending  # type: ignore[attr-defined]
        until(partial(_both_wait, attending), "both wait")
        both[0].close()
        if last_leaves:
            both[1].close()
            until(lambda: _turns(running)[-1][0], "the turn is cancelled")
        pondering.done.set()
        if not last_leaves:
            assert "The answer." in both[1].read()
        _join(running)
        assert not attending
    assert [is_cancelled for is_cancelled, _ in _turns(running)] == [False, True]


def test_a_resumed_stream_waits_for_the_turn(
    http: TestClient, connect: Callable[..., Connection], model: Scripted, running: Runtime
) -> None:
    """A client that has lost its connection reads on by the response's id before the gateway notices the loss."""
    pondering = Pondering()
    model.lines = [pondering]
    lost = connect(RESPONSES, _body(RESPONSES, stream=True), CANCEL)
    assert pondering.called.wait(20)
    with running.database.engine.connect() as connection:
        [turn_id] = connection.execute(text("SELECT turn_id FROM turns")).scalars()
    resumed: list[str] = []
    resuming = threading.Thread(
        target=lambda: resumed.append(http.get(f"{RESPONSES}/resp_{turn_id.hex}?stream=true").text)
    )
    resuming.start()
    until(lambda: http.app.state.gateway._attending[turn_id] == 2, "both wait")  # type: ignore[attr-defined]
    lost.close()
    pondering.done.set()
    resuming.join(20)
    assert "The answer." in resumed[0]
    assert _turns(running) == [(False, "done")]
