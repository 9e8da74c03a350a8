"""Behaviour of the provider `openai:` only. `provider_suite.py` tests the behaviour that all providers share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.errors import (
    ContentFiltered,
    ContextTooLong,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
    SettingsError,
)
from perdure.models.endings import ended_properly
from perdure.models.endpoints import OPENAI
from perdure.models.protocol import Message, Role, ToolCall
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import QUESTION, ask
from tests.models.endpoints import configured
from tests.models.openai_server import Chunks, OpenAIServer, Status, Step, chunk
from tests.models.server import Answer, Raw


@pytest.mark.parametrize(
    "step",
    [
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
def test_refuses_a_malformed_response(model: EndpointModel, server: OpenAIServer, step: Step) -> None:
    """A malformed response fails the call with `InvalidResponse`."""
    server.script(step)
    with pytest.raises(InvalidResponse):
        ask(model, QUESTION)


@pytest.mark.parametrize(
    "step",
    [
        Status(400, "context_length_exceeded"),
        Status(400, message="This model's maximum context length is 4096 tokens."),
        Chunks([{"error": {"message": "too long", "code": "context_length_exceeded"}}]),
        Raw(
            b'{"object": "error", "message": "It is 9 tokens.", "type": "exceed_context_size_error", "code": 400}',
            "application/json",
            status=400,
        ),
        Raw(
            b'{"message": "This model\'s maximum context length is 2048 tokens.", "type": {}, "code": 400}',
            "application/json",
            status=400,
        ),
    ],
)
def test_recognises_a_prompt_that_is_too_long(model: EndpointModel, server: OpenAIServer, step: Step) -> None:
    """If an error's code, type or text says that the prompt is too long, the call raises `ContextTooLong`."""
    server.script(step)
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)


AZURE = {
    "error": {
        "message": "The response was filtered.",
        "type": None,
        "code": "content_filter",
        "status": 400,
        "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": {"hate": {"filtered": True}}},
    }
}


@pytest.mark.parametrize(
    "step",
    [
        Raw(json.dumps(AZURE).encode(), "application/json", status=400),
        Status(400, "content_policy_violation"),
        Status(400, "invalid_prompt"),
        Chunks([AZURE]),
        Chunks([chunk([{"index": 0, "delta": {}, "finish_reason": "SAFETY"}])]),
    ],
    ids=["Azure", "content policy", "invalid prompt", "in mid-stream", "a server's own spelling"],
)
def test_recognises_a_content_filter(model: EndpointModel, server: OpenAIServer, step: Step) -> None:
    """A content filter's refusal raises `ContentFiltered`, however the server reports it."""
    server.script(step)
    with pytest.raises(ContentFiltered):
        ask(model, QUESTION)


@pytest.mark.parametrize(
    ("error", "kind", "transient"),
    [
        ({"message": "Invalid content", "type": "BadRequestError", "code": 400}, ProviderError, False),
        ({"message": "Invalid content", "type": "invalid_request_error", "code": None}, ProviderError, False),
        ({"message": "Forbidden", "code": 403}, ProviderError, False),
        (
            {"message": "Filtered", "type": "invalid_request_error", "code": "moderation_blocked"},
            ContentFiltered,
            False,
        ),
        ({"message": "prompt is too long", "code": 400}, ContextTooLong, False),
        ({"message": "Slow down", "code": 429}, RateLimited, True),
        ({"message": "Overloaded", "type": "invalid_request_error", "code": 503}, ProviderError, True),
        ({"message": "Oops", "type": {"a": 1}, "code": "9" * 5_000}, ProviderError, True),
        ("oops", ProviderError, True),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_maps_an_error_without_a_status_by_its_code_or_type(
    model: EndpointModel,
    server: OpenAIServer,
    error: object,
    kind: type[PerdureError],
    *,
    transient: bool,
    streamed: bool,
) -> None:
    """An error within a stream, or as JSON under status 200, says in its body whether the input caused it."""
    body = {"error": error}
    server.script(Chunks([body]) if streamed else Raw(json.dumps(body).encode(), "application/json"))
    with pytest.raises(kind) as caught:
        ask(model, QUESTION)
    assert caught.value.transient is transient


@pytest.mark.parametrize("body", [b'{"error": ', b"[" * 100_000, b"\xff", b"[]"])
def test_refuses_malformed_json_with_status_200(model: EndpointModel, server: OpenAIServer, body: bytes) -> None:
    """JSON that cannot be read, or that has no error, fails the call with `InvalidResponse`."""
    server.script(Raw(body, "application/json"))
    with pytest.raises(InvalidResponse):
        ask(model, QUESTION)


def test_json_with_status_200_that_breaks_off_is_a_failed_connection(
    model: EndpointModel, server: OpenAIServer
) -> None:
    """A connection lost in the middle of such a body is a transient failure, as in the middle of a stream."""
    server.script(Raw(b'{"error": ', "application/json", promised=1_000))
    with pytest.raises(ProviderError, match="connection") as caught:
        ask(model, QUESTION)
    assert caught.value.transient


def test_a_refusal_is_a_reply_that_runs_no_call(model: EndpointModel, server: OpenAIServer) -> None:
    """A refusal in the model's own words is shown to the user. The provider ends it with `stop`, like an answer."""
    call = {"index": 0, "id": "a", "function": {"name": "clock", "arguments": "{}"}}
    deltas: list[Any] = [{"refusal": "I cannot "}, {"refusal": "help with that."}, {"tool_calls": [call]}]
    chunks = [chunk([{"index": 0, "delta": each}]) for each in deltas]
    server.script(Chunks([*chunks, chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])]))
    reply = ask(model, QUESTION)
    assert (reply.content, reply.stop_reason) == ("I cannot help with that.", "refusal")
    assert reply.tool_calls
    assert not ended_properly(reply)


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": 3}, {"prompt_tokens": 3, "completion_tokens": None}])
def test_an_incomplete_usage_is_unknown(model: EndpointModel, server: OpenAIServer, usage: dict[str, Any]) -> None:
    """A usage without one of its two counts is unknown, because a missing count is not zero."""
    server.script(Answer("hello", usage=usage))
    assert ask(model, QUESTION).usage is None


def test_sends_the_key_and_asks_for_usage(model: EndpointModel, server: OpenAIServer) -> None:
    """A request contains the API key as a bearer token, the tools and the option `include_usage`."""
    ask(model, QUESTION)
    assert server.headers[0]["authorization"] == "Bearer sk-of-the-tests"
    assert server.requests[0]["stream_options"] == {"include_usage": True}
    assert [each["function"]["name"] for each in server.requests[0]["tools"]] == ["calculator", "clock"]


def test_joins_a_character_that_came_in_two_halves(model: EndpointModel, server: OpenAIServer) -> None:
    """If an emoji is split between two chunks, its halves are joined. Lone surrogates and NUL are replaced."""
    pieces = ["ok \ud83d", "\ude00 \x00", "\ud83d"]
    deltas: list[Any] = [chunk([{"index": 0, "delta": {"content": piece}}]) for piece in pieces]
    server.script(Chunks([*deltas, chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])]))
    assert ask(model, QUESTION).content == "ok \N{GRINNING FACE} \ufffd\ufffd"


def test_needs_a_key_for_the_vendors_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with OpenAI's base URL cannot be created without an API key. The error names the missing variable."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(SettingsError, match="OPENAI_API_KEY is not set"):
        configured(OPENAI, "gpt-5")


def test_needs_no_key_for_another_address(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a base URL other than OpenAI's needs no API key, because local servers require none."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    assert ask(configured(OPENAI, "local"), QUESTION).tool_calls


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host/v1", "http://", "http://[::1"])
def test_refuses_an_invalid_base_url(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model cannot be created with an invalid base URL. The error names the setting and its value."""
    monkeypatch.setenv("OPENAI_BASE_URL", address)
    with pytest.raises(SettingsError, match="OPENAI_BASE_URL is"):
        configured(OPENAI, "gpt-5")


def test_the_test_server_refuses_an_invalid_transcript(model: EndpointModel) -> None:
    """The test server refuses an invalid transcript with status 400."""
    open_call = Message(Role.ASSISTANT, "", (ToolCall("call_1", "clock", "{}"),))
    with pytest.raises(PerdureError, match="status 400"):
        ask(model, QUESTION, open_call, QUESTION)
