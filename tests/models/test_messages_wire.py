"""The Messages wire format of requests and replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidResponse
from perdure.models.protocol import Message, ModelReply, ModelRequest, Role, ToolCall, ToolSchema, Usage
from perdure.models.providers.endpoint import CACHE_MARK, Quirks, adapted
from perdure.models.providers.errors import ProviderFailure
from perdure.models.providers.messages_wire import WIRE, ReplyAssembler, request_body
from tests.models.anthropic_server import validate_body
from tests.models.transcripts import TEXT, calls, interleavings, splits, transcripts

TOOL = ToolSchema("weather:today", "", {"type": "object", "properties": {}})


@given(transcripts(), st.booleans())
def test_the_provider_accepts_any_committed_transcript(messages: tuple[Message, ...], with_tools: bool) -> None:
    """Any committed transcript, even with repeated ids, malformed calls or blank texts, gives a valid request."""
    body = request_body("m", ModelRequest(messages, (TOOL,) if with_tools else ()))
    assert validate_body(body) == []
    contents = {each.content for each in messages if each.content.strip() and each.role is not Role.SYSTEM}
    assert contents <= {_content_of(block) for block in _blocks(body)}


@given(st.lists(st.builds(Message, st.sampled_from([Role.USER, Role.ASSISTANT, Role.SYSTEM]), TEXT), max_size=5))
def test_any_first_and_last_speaker_is_accepted(messages: list[Message]) -> None:
    """Any sequence of roles gives a valid request.

    A trimmed history may begin with an assistant's message, and the prompt of a summary may end with one.
    """
    assert validate_body(request_body("m", ModelRequest(tuple(messages)))) == []


@given(transcripts(), TEXT, TEXT)
def test_a_prompt_only_grows(messages: tuple[Message, ...], now: str, then: str) -> None:
    """If a prompt grows, its earlier messages and call ids stay the same, because providers cache prompts by prefix."""
    prompt = (*messages, Message(Role.USER, now))
    longer = (*prompt, Message(Role.ASSISTANT, "x"), Message(Role.USER, then))
    before = _blocks(request_body("m", ModelRequest(prompt)))
    assert _blocks(request_body("m", ModelRequest(longer)))[: len(before)] == before


def _blocks(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for turn in body["messages"] for block in turn["content"]]


def _content_of(block: dict[str, Any]) -> str | None:
    text: str | None = block.get("text") or block.get("content")
    return text


def test_without_tools_the_calls_of_the_conversation_are_named_and_forbidden() -> None:
    """If the request offers no tools, its body defines the tools of earlier calls and forbids new calls."""
    request_of_call = Message(Role.ASSISTANT, "", (ToolCall("a", "weather:today", "{}"),))
    body = request_body(
        "m", ModelRequest((Message(Role.USER, "hi"), request_of_call, Message(Role.TOOL, "", tool_call_id="a")))
    )
    assert [each["name"] for each in body["tools"]] == ["weather_today"]
    assert body["tool_choice"] == {"type": "none"}
    assert validate_body(body) == []


@given(st.data(), TEXT, calls(TEXT))
def test_any_split_into_events_gives_the_same_reply(
    data: st.DataObject, text: str, wanted: tuple[ToolCall, ...]
) -> None:
    """A reply is the same, however the server splits it into events and interleaves its blocks."""
    wanted = tuple(ToolCall(f"call_{at}", call.name or "f", call.arguments) for at, call in enumerate(wanted))
    text = text if text.strip() or wanted else "x"
    opened = [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}]
    streams = [[delta(0, "text_delta", text=piece) for piece in data.draw(splits(text))]]
    for index, call in enumerate(wanted, start=1):
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        opened.append({"type": "content_block_start", "index": index, "content_block": block})
        pieces = data.draw(splits(call.arguments))
        streams.append([delta(index, "input_json_delta", partial_json=piece) for piece in pieces])
    streamed_text, reply = assemble([*opened, *data.draw(interleavings(streams))])
    assert streamed_text == text
    assert reply.content == text
    assert reply.tool_calls == wanted


@given(st.text(max_size=20), st.data())
def test_the_streamed_text_equals_the_reply(text: str, data: st.DataObject) -> None:
    """The streamed text equals the reply and can be stored, even if the server sends lone surrogates or NUL."""
    streamed_text, reply = assemble([delta(0, "text_delta", text=piece) for piece in data.draw(splits(f"x{text}"))])
    assert streamed_text == reply.content
    assert "\x00" not in reply.content
    reply.content.encode()


def test_thinking_is_no_part_of_the_reply() -> None:
    """Thinking blocks are neither streamed nor part of the reply."""
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    events = [
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        delta(0, "thinking_delta", thinking="hm"),
        delta(0, "signature_delta", signature="x"),
        delta(1, "text_delta", text="Yes."),
    ]
    assert assemble(events)[1].content == "Yes."


@pytest.mark.parametrize("streamed", [True, False])
def test_arguments_may_come_whole_with_the_call(streamed: bool) -> None:
    """A compatible server may send a call's arguments in the block's start event, with or without delta events."""
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    events = [{"type": "content_block_start", "index": 0, "content_block": block}]
    if streamed:
        events.append(delta(0, "input_json_delta", partial_json='{"x": 1}'))
    assert assemble(events)[1].tool_calls == (ToolCall("a", "f", '{"x": 1}'),)


def test_a_proper_end_does_not_replace_an_improper_one() -> None:
    """A server may close a stream that was cut off with one more reason, `end_turn`. Its calls must not run."""
    cut_off = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}
    assert assemble([delta(0, "text_delta", text="half"), cut_off])[1].stop_reason == "length"


def test_usage_is_cumulative_and_the_last_event_counts() -> None:
    """Usage is cumulative, so the last value of each field counts."""
    events = [
        {"type": "message_start", "message": {"model": "m-1", "usage": {"input_tokens": 9, "output_tokens": 1}}},
        {"type": "message_delta", "usage": {"cache_read_input_tokens": 90, "output_tokens": 5}},
        {"type": "message_delta", "usage": {"output_tokens": 12, "cache_creation": {"ephemeral": 1}}},
        delta(0, "text_delta", text="x"),
    ]
    reply = assemble(events)[1]
    assert reply.usage == Usage(99, 12, 90)
    assert reply.model == "m-1"


def _json_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["type", "index", "id", "name", "input", "text", "usage", "stop_reason", "partial_json"])
    return st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3)


@given(
    st.sampled_from(["message_start", "content_block_start", "content_block_delta", "message_delta", "ping", "new"]),
    st.sampled_from(["message", "content_block", "delta", "usage"]),
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), _json_of, max_leaves=8),
)
def test_no_event_breaks_the_assembly(kind: str, place: str, value: object) -> None:
    """Events with any JSON raise no error except `InvalidResponse`."""
    assembler = ReplyAssembler()
    for given_type in ({}, {"type": "tool_use"}, {"type": "input_json_delta"}, {"type": "text"}):
        inner = {**value, **given_type} if isinstance(value, dict) else value
        try:
            assembler.feed({"type": kind, place: inner, "index": value})
        except InvalidResponse:
            continue
    assembler.feed(delta(99, "text_delta", text="x"))
    assembler.feed({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})
    assert json.dumps(assembler.finish()[1].content)


def delta(index: int, kind: str, **parts: str) -> dict[str, Any]:
    """A delta event for the block with this index."""
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **parts}}


def assemble(events: Sequence[Any]) -> tuple[str, ModelReply]:
    """The streamed text and the reply for these events."""
    assembler = ReplyAssembler()
    streamed_text = [assembler.feed(each) for each in events]
    assembler.feed({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})
    rest, reply = assembler.finish()
    return "".join(streamed_text) + rest, reply


def test_a_call_with_the_index_of_thoughts_leaves_them_as_they_are() -> None:
    """Some servers give each block the index 0. The arguments of the call are no part of the thoughts."""
    thoughts = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    assembler = ReplyAssembler()
    for event in (
        {"type": "content_block_start", "index": 0, "content_block": thoughts},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "a", "name": "f"}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "input_json_delta", "partial_json": '{"x": 1}'},
        },
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    ):
        assembler.feed(event)
    _, reply = assembler.finish()
    assert reply.opaque is not None
    assert reply.opaque.parts["message"]["blocks"] == [thoughts, {"type": "tool_use"}]
    assert [call.arguments for call in reply.tool_calls] == ['{"x": 1}']


CONVERSATION = (
    Message(Role.SYSTEM, "You help."),
    Message(Role.SYSTEM, "The user likes tea."),
    Message(Role.USER, "hello"),
    Message(Role.ASSISTANT, "Hi."),
    Message(Role.SYSTEM, "It is noon."),
    Message(Role.USER, "What time is it?"),
)


def test_a_note_is_a_block_before_the_users_message() -> None:
    """The system prompt has what lasts. Tools, system prompt and messages are in the order of the provider's cache."""
    body = request_body("m", ModelRequest(CONVERSATION, (TOOL,)))
    assert body["system"] == "You help.\n\nThe user likes tea."
    assert [each["text"] for each in body["messages"][-1]["content"]] == ["It is noon.", "What time is it?"]
    assert [each for each in body if each in {"tools", "system", "messages"}] == ["tools", "system", "messages"]
    assert CACHE_MARK not in json.dumps(body)


@given(transcripts(), st.booleans())
def test_a_prompt_has_at_most_four_marks(messages: tuple[Message, ...], with_tools: bool) -> None:
    """The provider refuses more, and accepts the prompt with them."""
    said = [each for each in messages if each.role is not Role.SYSTEM]
    asked = (*CONVERSATION[:2], *said, *CONVERSATION[-2:])
    body = request_body("m", ModelRequest(asked, (TOOL,) if with_tools else ()), Quirks(caches=True))
    assert validate_body(body) == []
    assert json.dumps(body).count(CACHE_MARK) <= 4
    assert [CACHE_MARK in each for each in body["system"]] == [True, True]


def test_a_refused_mark_is_left_out() -> None:
    """A server between perdure and the provider may refuse it."""
    request, quirks = ModelRequest(CONVERSATION, (TOOL,)), Quirks(caches=True)
    body = request_body("m", request, quirks)
    said = "system.0.cache_control: extra inputs are not permitted"
    found = adapted(quirks, ProviderFailure(400, None, said, {}), body, WIRE.required)
    assert found is not None
    assert request_body("m", request, found.quirks) == request_body("m", request)
