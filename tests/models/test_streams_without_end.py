"""A reply is complete when the server has named its end, also if the stream itself does not end.

Gateways send neither `[DONE]` nor `message_stop`, and keep the connection open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from perdure.clock import MovedClock, SystemClock
from perdure.models.adapted import AdaptedModel, adapted_model, http
from perdure.models.protocol import CallAborted, ModelCall, Usage
from perdure.models.providers import model as own
from perdure.models.providers import reply
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import QUESTION, ask, new_call
from tests.models.adapted.test_adapted_suite import BlocksServer
from tests.models.endpoints import model_of
from tests.models.openai_server import OpenAIServer, chunk
from tests.models.responses_server import ResponsesServer
from tests.models.server import Answer, Call, Chunks, ProviderServer

Made = EndpointModel | AdaptedModel

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
KINDS: dict[str, tuple[str, type[ProviderServer], str]] = {
    "chat-own": ("own", OpenAIServer, "openai"),
    "chat-adapted": ("adapted", OpenAIServer, "openai-chat"),
    "messages-own": ("own", BlocksServer, "anthropic"),
    "messages-adapted": ("adapted", BlocksServer, "anthropic"),
    "responses-adapted": ("adapted", ResponsesServer, "openai-responses"),
}


@pytest.fixture(params=[*KINDS])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[ProviderServer, Made]]:
    """A server, and a model of it."""
    kind, server, protocol = KINDS[request.param]
    with server(player=lambda _: Answer("Yes.")) as running:
        if kind == "own":
            made: Made = model_of(running, kind=protocol)
        else:
            endpoint = Endpoint("there", running.base_url, "key")
            made = adapted_model("there:test-model", SystemClock(), "PERDURE_MODEL", endpoint, protocol)
        yield running, made
        made.close()


def without_end(server: ProviderServer, answer: Answer, heartbeat: bytes = b"") -> Chunks:
    """`answer` with its end and its usage, on a connection that stays open."""
    return Chunks(server.chunks(answer, "test-model"), done=False, hang=True, heartbeat=heartbeat)


@pytest.mark.parametrize("heartbeat", ["nothing", "comments", "events"])
def test_a_reply_needs_no_end_of_its_stream(
    served: tuple[ProviderServer, Made], monkeypatch: pytest.MonkeyPatch, heartbeat: str
) -> None:
    """Whatever keeps the connection open does not prolong the wait, and the next call gets another connection."""
    monkeypatch.setattr(reply, "REST_S", 0.2)
    server, model = served
    empty = server.frame(chunk([])) if isinstance(server, OpenAIServer) else PING
    sent = {"nothing": b"", "comments": b": keep-alive\n\n", "events": empty}[heartbeat]
    text, calls = Answer("Yes."), Answer(calls=[Call("calculator", '{"expression": "2"}')])
    server.script(without_end(server, text, sent), without_end(server, calls, sent), Answer("Again."))
    said: list[str] = []
    found = ask(model, QUESTION, call=ModelCall(SystemClock(), 20.0, said.append))
    assert ("".join(said), found.content, found.stop_reason) == ("Yes.", "Yes.", "stop")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (11, 7)
    [call] = ask(model, QUESTION, call=new_call(20.0)).tool_calls
    assert (call.name, call.arguments) == ("calculator", '{"expression": "2"}')
    assert ask(model, QUESTION).content == "Again."


def test_usage_may_follow_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends the usage of a reply when it has counted the tokens."""
    monkeypatch.setattr(reply, "REST_S", 10.0)
    with OpenAIServer() as server:
        model = model_of(server)
        server.script(Answer("Yes.", interval_s=0.05))
        assert ask(model, QUESTION).usage == Usage(11, 7)
        model.close()


def test_a_call_does_not_wait_for_the_rest_to_its_deadline() -> None:
    """The reply would be lost with the call."""
    assert 0 < reply.rest_s(new_call(4.0)) <= 2.0
    assert reply.rest_s(new_call(400.0)) == reply.REST_S


WORDS = ("one ", "two ", "three ", "four")


class HastyServer(OpenAIServer):
    """Names the end of a reply in each chunk, and sends the next one when `read` is released."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Semaphore(0)

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        return [chunk([{"index": 0, "delta": {"content": each}, "finish_reason": "stop"}], model) for each in WORDS]

    def pause(self, seconds: float | None) -> bool:
        """Wait for the reader."""
        return self.read.acquire(timeout=30) and super().pause(0)


def test_each_piece_after_the_end_begins_a_new_wait() -> None:
    """A server may name the end too early."""
    with HastyServer() as server:
        clock = MovedClock()

        def take(_: str) -> None:
            clock.advance(timedelta(seconds=0.6 * reply.REST_S))
            server.read.release()

        model = EndpointModel(Endpoint("there", server.base_url), "test-model", clock)
        server.script(Answer(interval_s=1.0))
        assert ask(model, QUESTION, call=ModelCall(clock, 1000.0, take)).content == "".join(WORDS)
        model.close()


def test_each_piece_after_the_end_begins_a_new_wait_of_an_adapted_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of perdure's own. The clock of the event loop cannot be moved."""
    begun: list[float] = []

    def rest_s(call: ModelCall) -> float:
        begun.append(call.remaining())
        return 30.0

    monkeypatch.setattr(http, "rest_s", rest_s)
    with HastyServer() as server:
        endpoint = Endpoint("there", server.base_url, "key")
        model = adapted_model("there:test-model", SystemClock(), "PERDURE_MODEL", endpoint, "openai-chat")
        server.script(Answer(interval_s=1.0))
        call = ModelCall(SystemClock(), 60.0, lambda _: server.read.release())
        assert ask(model, QUESTION, call=call).content == "".join(WORDS)
        assert len(begun) >= len(WORDS)
        model.close()


def test_an_abort_ends_the_wait_for_the_rest(
    served: tuple[ProviderServer, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is a part of the call."""
    server, model = served
    waits = threading.Event()

    def rest_s(_: ModelCall) -> float:
        waits.set()
        return 60.0

    for module in (own, http):
        monkeypatch.setattr(module, "rest_s", rest_s)
    server.script(without_end(server, Answer("Yes.")))
    call = new_call(120.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, model, QUESTION, call=call)
        assert waits.wait(30)
        call.abort()
        assert isinstance(asked.exception(30), CallAborted)
