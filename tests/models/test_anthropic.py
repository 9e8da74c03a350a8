"""Behaviour of the provider `anthropic:` only. `provider_suite.py` tests the behaviour that all providers share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import ContextTooLong, InvalidResponse, PerdureError, ProviderError, RateLimited, SettingsError
from perdure.models.endpoints import ANTHROPIC
from perdure.models.protocol import Message, ModelCall, ModelRequest, Role, ToolCall, ToolSchema, Usage
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import QUESTION, SYSTEM, ask, new_call, turn
from tests.models.anthropic_server import AnthropicServer, events_of
from tests.models.endpoints import configured, model_of
from tests.models.server import Answer, Broken, Call, Chunks, Raw, Status, Step, Wire


@pytest.fixture
def server() -> Iterator[AnthropicServer]:
    """A server that responds as `two_steps` does, unless the test scripts other responses."""
    with AnthropicServer() as running:
        yield running


@pytest.fixture
def model(server: AnthropicServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointModel]:
    """A model that calls `server`, configured by environment variables as in production."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.base_url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-tests")
    made = configured(ANTHROPIC, "test-model")
    yield made
    made.close()


def test_sends_the_fields_that_the_vendor_requires(model: EndpointModel, server: AnthropicServer) -> None:
    """A request contains the API key, the API version and the tools. The system prompt has its own field."""
    ask(model, QUESTION)
    assert server.headers[0]["x-api-key"] == "sk-of-the-tests"
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
    model: EndpointModel, server: AnthropicServer, error: Status, kind: type[PerdureError], transient: bool
) -> None:
    """The type of an error event determines the error, because the response's status is already 200."""
    server.script(Broken(Answer("a good beginning"), 4, error))
    with pytest.raises(kind) as caught:
        ask(model, QUESTION)
    assert caught.value.transient is transient


@pytest.mark.parametrize("kind", [400, {"a": 1}, ["a"], True], ids=repr)
def test_the_type_of_an_error_may_be_of_any_type(model: EndpointModel, server: AnthropicServer, kind: object) -> None:
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
def test_recognises_a_prompt_that_is_too_long(model: EndpointModel, server: AnthropicServer, message: str) -> None:
    """If the provider's error message says that the prompt is too long, the call raises `ContextTooLong`.

    The provider has no error code for this case.
    """
    server.script(Status(400, message=message))
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)


def test_an_overflow_without_a_word_is_a_prompt_that_is_too_long(model: EndpointModel, server: AnthropicServer) -> None:
    """The prompt filled the context window, so a shorter prompt helps."""
    server.script(Answer(finish_reason="model_context_window_exceeded"))
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)
    server.script(Answer("half", finish_reason="model_context_window_exceeded"))
    assert ask(model, QUESTION).stop_reason == "length"


@pytest.mark.parametrize(("ended", "arguments"), [(True, "{}"), (False, "")])
def test_an_empty_piece_of_a_whole_call_is_an_empty_object(
    model: EndpointModel, server: AnthropicServer, *, ended: bool, arguments: str
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
def test_refuses_a_malformed_response(model: EndpointModel, server: AnthropicServer, step: Step) -> None:
    """A malformed response fails the call with `InvalidResponse`."""
    server.script(step)
    with pytest.raises(InvalidResponse):
        ask(model, QUESTION)


def test_does_not_wait_for_what_comes_after_the_end(model: EndpointModel, server: AnthropicServer) -> None:
    """A call ends at `message_stop`, even if a proxy keeps the stream open."""
    whole = [*events_of(Answer("whole")), {"type": "message_stop"}]
    server.script(Chunks(whole, hang=True))
    assert ask(model, QUESTION).content == "whole"


def test_needs_a_key_for_the_vendors_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with Anthropic's base URL cannot be created without an API key. The error names the missing variable."""
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with pytest.raises(SettingsError, match=r"ANTHROPIC_API_KEY is not set and PERDURE_MODEL is 'anthropic:claude'"):
        configured(ANTHROPIC, "claude")


def test_refuses_an_invalid_base_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model cannot be created with an invalid base URL. The error names the setting and its value."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "localhost:8000")
    with pytest.raises(SettingsError, match="ANTHROPIC_BASE_URL is 'localhost:8000'"):
        configured(ANTHROPIC, "claude")


def test_the_test_server_refuses_an_invalid_transcript(model: EndpointModel) -> None:
    """The test server refuses an invalid transcript with status 400."""
    open_call = Message(Role.ASSISTANT, "", (ToolCall("call_1", "clock", "{}"),))
    with pytest.raises(PerdureError, match="status 400"):
        ask(model, QUESTION, open_call, QUESTION)


# --- what the provider needs back

THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
OMITTED = {"type": "thinking", "thinking": "", "signature": "b21p"}
REDACTED = {"type": "redacted_thinking", "data": "ZGF0YQ=="}
SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "x", "url": "y"}]}


def streamed(*blocks: Wire, stop: str = "end_turn") -> Chunks:
    """A stream of these blocks, with thoughts, signatures, texts and inputs in pieces."""
    events: list[Any] = [{"type": "message_start", "message": {"model": "m"}}]
    for index, block in enumerate(blocks):
        opened, pieces = dict(block), list[dict[str, Any]]()
        for member, kind in (("thinking", "thinking_delta"), ("text", "text_delta")):
            if whole := block.get(member, ""):
                opened[member] = ""
                pieces += [{"type": kind, member: each} for each in (whole[:2], whole[2:])]
        if "signature" in block:
            opened["signature"] = ""
            pieces.append({"type": "signature_delta", "signature": block["signature"]})
        if "input" in block:
            opened["input"] = {}
            text = json.dumps(block["input"])
            pieces += [{"type": "input_json_delta", "partial_json": each} for each in (text[:3], text[3:])]
        events.append({"type": "content_block_start", "index": index, "content_block": opened})
        events += [{"type": "content_block_delta", "index": index, "delta": each} for each in pieces]
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": stop}})
    return Chunks(events)


def test_blocks_of_thinking_come_back_as_they_were(server: AnthropicServer) -> None:
    """The provider verifies signatures, and wants the blocks in their order, also between two calls."""
    calls: list[Wire] = [
        {"type": "tool_use", "id": f"toolu_{at}", "name": "calculator", "input": {"expression": str(at)}}
        for at in (1, 2)
    ]
    blocks = [THINKING, {"type": "text", "text": "One."}, calls[0], OMITTED, REDACTED, calls[1]]
    server.script(streamed(*blocks, stop="tool_use"))
    model = model_of(server, "claude-sonnet-5", kind=ANTHROPIC)
    conversation = turn(model, QUESTION)
    assert (conversation[1].content, len(conversation[1].tool_calls)) == ("One.", 2)
    assert server.requests[1]["messages"][1]["content"] == blocks
    opaque = conversation[1].opaque
    assert opaque is not None
    for other in (
        model_of(server, "claude-opus-5", kind=ANTHROPIC),
        model_of(server, "m", "b", kind=ANTHROPIC),
    ):
        ask(other, *conversation, QUESTION)
        kinds = [each["type"] for each in server.requests[-1]["messages"][1]["content"]]
        assert kinds == ["text", "tool_use", "tool_use"]


def test_the_providers_own_tools_come_back(server: AnthropicServer) -> None:
    """The blocks of tools that the provider runs itself are kept, with their streamed input."""
    blocks: list[Wire] = [SEARCH, FOUND, {"type": "text", "text": "Found."}]
    server.script(streamed(*blocks))
    model = model_of(server, kind=ANTHROPIC)
    reply = ask(model, QUESTION)
    assert (reply.content, reply.tool_calls, reply.thoughts) == ("Found.", (), "")
    ask(model, QUESTION, Message(Role.ASSISTANT, reply.content, opaque=reply.opaque), QUESTION)
    assert server.requests[1]["messages"][1]["content"] == blocks


def test_thoughts_are_no_text(server: AnthropicServer) -> None:
    """Thoughts arrive in blocks of their own. A text with tags at its beginning is thoughts, too."""
    server.script(streamed(THINKING, {"type": "text", "text": "<think>So.</think>Yes."}))
    texts: list[str] = []
    reply = ask(model_of(server, kind=ANTHROPIC), QUESTION, call=ModelCall(SystemClock(), 30.0, texts.append))
    assert (reply.content, reply.thoughts, "".join(texts)) == ("Yes.", "Hm.So.", "Yes.")


def test_whole_json_is_read_as_the_reply(server: AnthropicServer) -> None:
    """A server that does not stream sends the message as JSON."""
    body = server.whole(Answer("Yes.", calls=[Call("calculator", '{"expression": "2"}', "a")]), "m")
    body = {**body, "content": [THINKING, *body["content"]]}
    server.script(Raw(json.dumps(body).encode(), "application/json"))
    reply = ask(model_of(server, kind=ANTHROPIC), QUESTION)
    assert (reply.content, reply.thoughts, reply.stop_reason, reply.model) == ("Yes.", "Hm.", "tool_calls", "m")
    assert reply.tool_calls == (ToolCall("a", "calculator", '{"expression": "2"}'),)
    assert reply.usage == Usage(11, 7, 3)
    assert reply.opaque is not None
    assert reply.opaque.parts["message"]["blocks"][0] == THINKING


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"output_tokens_details": {"thinking_tokens": 4}}, Usage(1, 9, None, 4)),
        ({"cache_read_input_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}, Usage(1, 9, 0, 0)),
        ({"cache_read_input_tokens": 2}, Usage(3, 9, 2)),
    ],
)
def test_usage_has_the_tokens_of_thoughts(server: AnthropicServer, more: Wire, expected: Usage) -> None:
    """Cached tokens are input tokens, which the provider counts apart; those of thoughts are output tokens.

    What a server does not report is `None`, and a 0 that it does is 0.
    """
    usage = {"input_tokens": 1, "output_tokens": 9, **more}
    message = {"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn", "usage": usage}
    server.script(Raw(json.dumps(message).encode(), "application/json"))
    assert ask(model_of(server, kind=ANTHROPIC), QUESTION).usage == expected


# --- settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.5, "max_tokens": 9}, {"temperature": 0.5, "max_tokens": 9}),
        ({"stop_sequences": ["x"], "top_k": 3}, {"stop_sequences": ["x"], "top_k": 3}),
        ({"thinking": False}, {"thinking": {"type": "disabled"}}),
        ({"thinking": "minimal"}, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}),
        ({"reasoning_effort": "high", "thinking": False}, {"output_config": {"effort": "high"}}),
        ({"tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
        ({"tool_choice": ["f:1"]}, {"tool_choice": {"type": "tool", "name": "f_1"}}),
        ({"tool_choice": ["f:1", "g"]}, {"tool_choice": {"type": "any"}}),
        ({"parallel_tool_calls": False}, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        ({"parallel_tool_calls": True}, {"tool_choice": None}),
        ({"service_tier": "default"}, {"service_tier": "standard_only"}),
        ({"service_tier": "flex", "seed": 1}, {"service_tier": None, "seed": None}),
        ({"extra_body": {"speed": "fast"}}, {"speed": "fast", "extra_body": None}),
    ],
)
def test_settings_are_options_of_the_request(
    server: AnthropicServer, settings: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Settings have the names of pydantic-ai. What the protocol does not have is not sent."""
    tools = tuple(ToolSchema(each, "", {}) for each in ("f:1", "g", "h"))
    model = model_of(server, kind=ANTHROPIC)
    model.respond(ModelRequest((QUESTION,), tools, settings), new_call())
    body = server.requests[0]
    assert {name: body.get(name) for name in expected} == expected
    offered = ["f_1", "g"] if settings.get("tool_choice") == ["f:1", "g"] else ["f_1", "g", "h"]
    assert [each["name"] for each in body["tools"]] == offered
    assert settings.keys() - model.supported_settings <= {"seed"}


def test_structured_output_is_requested(server: AnthropicServer) -> None:
    """The provider has an option for a schema. A server without it gets none after its refusal."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    server.script(Answer("{}"), Status(400, message="output_config: Extra inputs are not permitted"), Answer("{}"))
    model = model_of(server, kind=ANTHROPIC)
    for _ in range(2):
        model.respond(ModelRequest((QUESTION,), output=schema), new_call())
    assert server.requests[0]["output_config"] == {"format": {"type": "json_schema", "schema": schema}}
    assert "output_config" not in server.requests[2]


@pytest.mark.parametrize(
    ("said", "choice"),
    [
        ("Expected `thinking` or `redacted_thinking`, but found `tool_use`.", {}),
        ("Thinking may not be enabled when tool_choice forces tool use.", {"tool_choice": "required"}),
    ],
    ids=["calls of another model", "a required call"],
)
def test_thinking_pauses(server: AnthropicServer, said: str, choice: dict[str, Any]) -> None:
    """The provider refuses calls that no thoughts precede, and thoughts before a call that it must make.

    This concerns one request, not the later ones. The call stays required.
    """
    server.script(Status(400, message=said), Answer("a"), Answer("b"))
    model = model_of(server, kind=ANTHROPIC)
    tool = ToolSchema("calculator", "", {"type": "object"})
    for _ in range(2):
        model.respond(ModelRequest((QUESTION,), (tool,), settings={"thinking": True, **choice}), new_call())
    assert ["thinking" in each for each in server.requests] == [True, False, True]
    assert all("tool_choice" in each for each in server.requests) == bool(choice)


def test_the_limit_of_tokens_is_never_left_out(server: AnthropicServer) -> None:
    """The protocol requires `max_tokens`."""
    server.script(Status(400, message="max_tokens: too large"))
    with pytest.raises(ProviderError):
        ask(model_of(server, kind=ANTHROPIC), QUESTION)
    assert len(server.requests) == 1


def test_an_address_may_end_in_the_version(server: AnthropicServer) -> None:
    """Compatible servers document their address with and without `/v1`."""
    endpoint = Endpoint("there", f"{server.base_url}/v1/", kind=ANTHROPIC)
    assert ask(EndpointModel(endpoint, "m", SystemClock()), QUESTION).tool_calls
