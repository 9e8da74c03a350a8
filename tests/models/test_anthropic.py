"""Behaviour of the provider `anthropic:` only. `provider_suite.py` tests the behaviour that all providers share."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from perdure.clock import SystemClock
from perdure.errors import ContextTooLong, InvalidResponse, PerdureError, ProviderError, RateLimited, SettingsError
from perdure.models.protocol import Message, Role, ToolCall
from perdure.models.providers.anthropic import AnthropicModel
from perdure.testing.suites.models import QUESTION, SYSTEM, ask
from tests.models.anthropic_server import AnthropicServer, events_of
from tests.models.server import Answer, Broken, Call, Chunks, Raw, Status, Step


@pytest.fixture
def server() -> Iterator[AnthropicServer]:
    """A server that responds as `two_steps` does, unless the test scripts other responses."""
    with AnthropicServer() as running:
        yield running


@pytest.fixture
def model(server: AnthropicServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnthropicModel]:
    """A model that calls `server`, configured by environment variables as in production."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.base_url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-tests")
    made = AnthropicModel("test-model", SystemClock())
    yield made
    made.close()


def test_sends_the_fields_that_the_vendor_requires(model: AnthropicModel, server: AnthropicServer) -> None:
    """A request contains the API key, the API version and the tools. The system prompt has its own field."""
    ask(model, QUESTION)
    assert server.headers[0]["authorization"] == "Bearer sk-of-the-tests"
    assert server.headers[0]["anthropic-version"]
    assert server.requests[0]["system"] == SYSTEM.content
    assert server.requests[0]["messages"] == [{"role": "user", "content": [{"type": "text", "text": QUESTION.content}]}]
    assert [each["name"] for each in server.requests[0]["tools"]] == ["calculator", "clock"]


@pytest.mark.parametrize(
    ("error", "kind", "transient"),
    [
        (Status(0, "overloaded_error"), ProviderError, True),
        (Status(0, "rate_limit_error"), RateLimited, True),
        (Status(0, "invalid_request_error"), ProviderError, False),
        (Status(0, "request_too_large"), ContextTooLong, False),
        (Status(0, "an_error_of_next_year"), ProviderError, True),
    ],
)
def test_maps_errors_within_a_stream(
    model: AnthropicModel, server: AnthropicServer, error: Status, kind: type[PerdureError], transient: bool
) -> None:
    """The type of an error event determines the error, because the response's status is already 200."""
    server.script(Broken(Answer("a good beginning"), 4, error))
    with pytest.raises(kind) as caught:
        ask(model, QUESTION)
    assert caught.value.transient is transient


@pytest.mark.parametrize("kind", [400, {"a": 1}, ["a"], True], ids=repr)
def test_the_type_of_an_error_may_be_of_any_type(model: AnthropicModel, server: AnthropicServer, kind: object) -> None:
    """The status alone determines the error then, and an event has none."""
    error = {"type": "error", "error": {"type": kind, "message": "x"}}
    server.script(Raw(json.dumps(error).encode(), "application/json", status=400), Chunks([error]))
    for transient in (False, True):
        with pytest.raises(ProviderError) as caught:
            ask(model, QUESTION)
        assert caught.value.transient is transient


@pytest.mark.parametrize(
    "message",
    [
        "prompt is too long: 210000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 199000 + 16384 > 200000",
    ],
)
def test_recognises_a_prompt_that_is_too_long(model: AnthropicModel, server: AnthropicServer, message: str) -> None:
    """If the provider's error message says that the prompt is too long, the call raises `ContextTooLong`.

    The provider has no error code for this case.
    """
    server.script(Status(400, message=message))
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)


def test_an_overflow_without_a_word_is_a_prompt_that_is_too_long(
    model: AnthropicModel, server: AnthropicServer
) -> None:
    """The prompt filled the context window, so a shorter prompt helps."""
    server.script(Answer(finish_reason="model_context_window_exceeded"))
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)
    server.script(Answer("half", finish_reason="model_context_window_exceeded"))
    assert ask(model, QUESTION).stop_reason == "length"


@pytest.mark.parametrize(("ended", "arguments"), [(True, "{}"), (False, "")])
def test_an_empty_piece_of_a_whole_call_is_an_empty_object(
    model: AnthropicModel, server: AnthropicServer, *, ended: bool, arguments: str
) -> None:
    """The provider streams the arguments `{}` as one empty piece, and then ends the block."""
    [start, ping, opening, *rest] = events_of(Answer(calls=[Call("clock", "")]))
    piece = {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ""}}
    closing = [each for each in rest if ended or each["type"] != "content_block_stop"]
    server.script(Chunks([start, ping, opening, piece, *closing]))
    assert ask(model, QUESTION).tool_calls == (ToolCall("call_1", "clock", arguments),)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Chunks(events_of(Answer("x" * 2_100_000, piece=100_000))), id="longer than any reply"),
        pytest.param(Chunks(events_of(Answer(calls=[Call("f")] * 129))), id="more calls than a message may hold"),
        pytest.param(
            Chunks([{"type": "content_block_delta", "index": 3, "delta": {"type": "input_json_delta"}}]),
            id="arguments of no call",
        ),
    ],
)
def test_refuses_a_malformed_response(model: AnthropicModel, server: AnthropicServer, step: Step) -> None:
    """A malformed response fails the call with `InvalidResponse`."""
    server.script(step)
    with pytest.raises(InvalidResponse):
        ask(model, QUESTION)


def test_does_not_wait_for_what_comes_after_the_end(model: AnthropicModel, server: AnthropicServer) -> None:
    """A call ends at `message_stop`, even if a proxy keeps the stream open."""
    whole = [*events_of(Answer("whole")), {"type": "message_stop"}]
    server.script(Chunks(whole, hang=True))
    assert ask(model, QUESTION).content == "whole"


def test_needs_a_key_for_the_vendors_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with Anthropic's base URL cannot be created without an API key. The error names the missing variable."""
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with pytest.raises(SettingsError, match=r"ANTHROPIC_API_KEY is not set and PERDURE_MODEL is 'anthropic:claude'"):
        AnthropicModel("claude", SystemClock())


def test_refuses_an_invalid_base_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model cannot be created with an invalid base URL. The error names the setting and its value."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "localhost:8000")
    with pytest.raises(SettingsError, match="ANTHROPIC_BASE_URL is 'localhost:8000'"):
        AnthropicModel("claude", SystemClock())


def test_the_test_server_refuses_an_invalid_transcript(model: AnthropicModel) -> None:
    """The test server refuses an invalid transcript with status 400."""
    open_call = Message(Role.ASSISTANT, "", (ToolCall("call_1", "clock", "{}"),))
    with pytest.raises(PerdureError, match="status 400"):
        ask(model, QUESTION, open_call, QUESTION)
