"""`openai:` against a server that behaves, and against one that does not."""

from __future__ import annotations

import json
import logging
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import (
    ContextTooLong,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
    SettingsError,
)
from perdure.models.openai import OpenAIModel
from perdure.models.protocol import Message, Role, ToolCall, Usage
from tests.models.openai_server import Answer, Call, Chunks, OpenAIServer, Raw, Status, Step, chunk
from tests.models.suite import QUESTION, ask


def test_puts_tool_calls_together_that_came_in_many_pieces(model: OpenAIModel, server: OpenAIServer) -> None:
    """Arguments are streamed a few characters at a time, several calls in one reply."""
    calls = [
        Call("calculator", '{"expression": "12*7+5"}', "call_a"),
        Call("clock", '{"zone": "Asia/Seoul"}', "call_b"),
    ]
    server.script(Answer(calls=calls, piece=1))
    reply = ask(model, QUESTION)
    assert reply.tool_calls == tuple(ToolCall(each.id, each.name, each.arguments) for each in calls)
    assert reply.usage == Usage(11, 7)
    assert reply.model == "test-model"


def test_takes_missing_usage_as_zero(model: OpenAIModel, server: OpenAIServer) -> None:
    """Compatible servers may not know `stream_options`."""
    server.script(Answer("hello", usage=None))
    assert ask(model, QUESTION).usage == Usage(0, 0)


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_keeps_why_a_reply_stopped(model: OpenAIModel, server: OpenAIServer, reason: str) -> None:
    """A reply that was cut off is a reply; what to make of it is for the engine to say."""
    server.script(Answer("hal", finish_reason=reason))
    assert ask(model, QUESTION).stop_reason == reason


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Answer(), id="neither text nor calls"),
        pytest.param(Answer(" \n "), id="only white space"),
        pytest.param(Answer(finish_reason="content_filter"), id="filtered away"),
        pytest.param(Raw(b"<html><body>It works!</body></html>", "text/html"), id="HTML with status 200"),
        pytest.param(Raw(b'{"answer": 42}', "application/json"), id="some other JSON"),
        pytest.param(Raw(b""), id="nothing"),
        pytest.param(Raw(b"data: \xff\xfe\x80\n\n"), id="no UTF-8"),
        pytest.param(Raw(b"data: {not json\n\n"), id="no JSON"),
        pytest.param(Raw(b"data: " + b"[" * 100_000 + b"\n\n"), id="nested without end"),
        pytest.param(Raw(b"data: 17\n\n"), id="a number for a chunk"),
        pytest.param(Raw(b'data: {"choices": [{"delta": {"content": "hal"}}]}\n\n'), id="cut off at an event's end"),
        pytest.param(Chunks([chunk([{"index": 0, "delta": {"content": "hal"}}])]), id="done, yet not finished"),
        pytest.param(
            Chunks([chunk([{"index": 0, "delta": {"content": "x" * 100_000}}])] * 21), id="longer than any reply"
        ),
        pytest.param(
            Chunks([chunk([{"index": 0, "delta": {"tool_calls": [{"index": at}]}}]) for at in range(129)]),
            id="more calls than a message may hold",
        ),
    ],
)
def test_refuses_what_is_no_reply(model: OpenAIModel, server: OpenAIServer, step: Step) -> None:
    """A server that answers nonsense fails the call; it never fails the process or passes for an answer."""
    server.script(step)
    with pytest.raises(InvalidResponse):
        ask(model, QUESTION)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Raw(b'data: {"choices": []}\n\n', promised=10_000), id="connection closed in the middle"),
        pytest.param(
            Chunks([{"error": {"message": "sk-secret", "code": "server_error"}}]), id="an error in the stream"
        ),
        pytest.param(Status(401, "invalid_api_key", "Incorrect API key provided: sk-secret"), id="401"),
        pytest.param(Status(404, "model_not_found", "sk-secret"), id="404"),
        pytest.param(Status(400, "invalid_value", "sk-secret"), id="400"),
        pytest.param(Status(500, message="sk-secret"), id="500"),
        pytest.param(Status(503, message="sk-secret"), id="503"),
    ],
)
def test_a_failing_provider_is_a_provider_error(model: OpenAIModel, server: OpenAIServer, step: Step) -> None:
    """The message may reach a user, so it holds nothing that the provider wrote."""
    server.script(step)
    with pytest.raises(ProviderError) as caught:
        ask(model, QUESTION)
    assert "secret" not in caught.value.message
    assert len(server.requests) == 1, "retrying is the engine's affair, not the SDK's"


@pytest.mark.parametrize(
    "step",
    [
        Status(400, "context_length_exceeded"),
        Status(400, message="This model's maximum context length is 4096 tokens."),
        Chunks([{"error": {"message": "too long", "code": "context_length_exceeded"}}]),
    ],
)
def test_knows_a_prompt_that_is_too_long(model: OpenAIModel, server: OpenAIServer, step: Step) -> None:
    """It is the one refusal that a shorter prompt cures; compatible servers give the sentence without the code."""
    server.script(step)
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
        ({}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "1e300"}, None),
        ({"Retry-After": "Wed, 99 Foo 2026 99:99:99 GMT"}, None),
    ],
)
def test_reads_how_long_to_wait(
    model: OpenAIModel, server: OpenAIServer, headers: dict[str, str], expected: float | None
) -> None:
    """Retry-After is honoured, and nonsense in it never becomes a wait."""
    server.script(Status(429, "rate_limit_exceeded", headers=headers))
    with pytest.raises(RateLimited) as caught:
        ask(model, QUESTION)
    assert caught.value.retry_after_s == expected


def test_reads_a_date_to_wait_for(model: OpenAIModel, server: OpenAIServer) -> None:
    """HTTP allows a date for Retry-After, too."""
    then = SystemClock().now() + timedelta(seconds=60)
    server.script(Status(429, headers={"Retry-After": format_datetime(then, usegmt=True)}))
    with pytest.raises(RateLimited) as caught:
        ask(model, QUESTION)
    assert caught.value.retry_after_s is not None
    assert 50 < caught.value.retry_after_s <= 60


def test_logs_what_a_provider_asks_for_in_a_report(
    model: OpenAIModel, server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The request id goes to the log: with it the provider can find the failure, without it nobody can."""
    server.script(Status(500, "overloaded"))
    with caplog.at_level(logging.WARNING), pytest.raises(ProviderError):
        ask(model, QUESTION)
    assert "status 500, code overloaded, request id req_1" in caplog.text


def test_a_server_that_is_not_there_is_a_provider_error(
    model: OpenAIModel, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused connections are the provider's failure, to be retried, not the caller's."""
    server.stop()
    with pytest.raises(ProviderError):
        ask(model, QUESTION)


def test_keeps_its_connection(model: OpenAIModel, server: OpenAIServer) -> None:
    """The SDK stops reading at `[DONE]`, and a handshake for each step would cost more than the step."""
    for _ in range(5):
        ask(model, QUESTION)
    server.script(Answer("after an error the connection still serves"))
    ask(model, QUESTION)
    assert server.connections == 1


def test_sends_the_key_and_asks_for_usage(model: OpenAIModel, server: OpenAIServer) -> None:
    """What goes over the wire is what the vendor's SDK would send."""
    ask(model, QUESTION)
    assert server.headers[0]["authorization"] == "Bearer sk-of-the-tests"
    assert server.requests[0]["stream_options"] == {"include_usage": True}
    assert [each["function"]["name"] for each in server.requests[0]["tools"]] == ["calculator", "clock"]


def test_joins_a_character_that_came_in_two_halves(model: OpenAIModel, server: OpenAIServer) -> None:
    """Servers that count UTF-16 units cut emoji in two; PostgreSQL refuses either half, and NUL."""
    pieces = ["ok \ud83d", "\ude00 \x00", "\ud83d"]
    deltas: list[Any] = [chunk([{"index": 0, "delta": {"content": piece}}]) for piece in pieces]
    server.script(Chunks([*deltas, chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])]))
    assert ask(model, QUESTION).content == "ok \N{GRINNING FACE} \ufffd\ufffd"


def test_needs_a_key_for_the_vendors_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start without a key must say which variable is missing, not fail at the first message."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(SettingsError, match="OPENAI_API_KEY is not set"):
        OpenAIModel("gpt-5", SystemClock())


def test_needs_no_key_for_another_address(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local servers have no keys."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    assert ask(OpenAIModel("local", SystemClock()), QUESTION).tool_calls


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host/v1", "http://", "http://[::1"])
def test_refuses_an_address_that_is_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong setting stops the start, with its name and value."""
    monkeypatch.setenv("OPENAI_BASE_URL", address)
    with pytest.raises(SettingsError, match="OPENAI_BASE_URL is"):
        OpenAIModel("gpt-5", SystemClock())


def test_a_refused_transcript_is_seen(model: OpenAIModel) -> None:
    """The test server judges transcripts; were it to accept anything, it would prove nothing."""
    open_call = Message(Role.ASSISTANT, "", (ToolCall("call_1", "clock", "{}"),))
    with pytest.raises(PerdureError, match="status 400"):
        ask(model, QUESTION, open_call, QUESTION)


def test_what_was_asked_is_sent_as_it_stands(model: OpenAIModel, server: OpenAIServer) -> None:
    """Text in any script reaches the provider unchanged."""
    ask(model, Message(Role.USER, "안녕하세요 \N{GRINNING FACE} Ünï"))
    assert json.dumps(server.requests[0]["messages"][-1], ensure_ascii=False) == (
        '{"role": "user", "content": "안녕하세요 \N{GRINNING FACE} Ünï"}'
    )
