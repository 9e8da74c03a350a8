"""The Chat Completions wire format of requests and replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.models.notes import placed
from perdure.models.protocol import Attachment, Message, ModelReply, ModelRequest, Role, ToolCall, ToolSchema
from perdure.models.providers.chat_wire import WIRE, ReplyAssembler, request_body
from perdure.models.providers.endpoint import CACHE_KEY, Endpoint, Quirks, adapted
from perdure.models.providers.errors import ProviderFailure
from tests.models.openai_server import chunk, validate_transcript
from tests.models.transcripts import TEXT, calls, id_of, interleavings, splits, transcripts


def _json_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["index", "id", "function", "name", "arguments", "content", "tool_calls"])
    return st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3)


@given(transcripts())
def test_the_provider_accepts_any_committed_transcript(messages: tuple[Message, ...]) -> None:
    """Any committed transcript, even with repeated call ids or malformed calls, gives a valid request."""
    sent = request_body("m", ModelRequest(messages))["messages"]
    assert validate_transcript(sent) == []
    assert [each["content"] or "" for each in sent] == [each.content for each in messages]


@given(transcripts(), TEXT)
def test_a_prompt_only_grows(messages: tuple[Message, ...], text: str) -> None:
    """If a prompt grows, its earlier messages and call ids stay the same, because providers cache prompts by prefix."""
    longer = (*messages, Message(Role.USER, text))
    assert (
        request_body("m", ModelRequest(longer))["messages"][:-1]
        == request_body("m", ModelRequest(messages))["messages"]
    )


@given(st.data(), TEXT, calls(TEXT))
def test_any_split_into_chunks_gives_the_same_reply(
    data: st.DataObject, text: str, wanted: tuple[ToolCall, ...]
) -> None:
    """A reply is the same, however the server splits it into chunks and interleaves its tool calls."""
    wanted = tuple(ToolCall(f"call_{at}", call.name or "f", call.arguments) for at, call in enumerate(wanted))
    streams: list[list[dict[str, Any]]] = [[{"content": piece} for piece in data.draw(splits(text))]]
    for index, call in enumerate(wanted):
        pieces = data.draw(splits(call.arguments))
        fragments: list[dict[str, Any]] = [{"index": index, "function": {"arguments": piece}} for piece in pieces]
        repeats = data.draw(st.booleans())
        for fragment in fragments if repeats else fragments[:1]:
            fragment["id"] = call.id
            fragment["function"]["name"] = call.name
        streams.append([{"tool_calls": [fragment]} for fragment in fragments])
    if not text.strip() and not wanted:
        text = "x"
        streams = [[{"content": text}]]
    streamed, reply = assemble(data.draw(interleavings(streams)))
    assert streamed == text
    assert reply.content == text
    assert sorted(reply.tool_calls, key=id_of) == sorted(wanted, key=id_of)


@given(st.text(max_size=20), st.data())
def test_the_streamed_text_equals_the_reply(text: str, data: st.DataObject) -> None:
    """The streamed text equals the reply and can be stored, even if the server sends lone surrogates or NUL."""
    streamed, reply = assemble([{"content": piece} for piece in data.draw(splits(f"x{text}"))])
    assert streamed == reply.content
    assert "\x00" not in reply.content
    reply.content.encode()


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(
            [[{"index": None, "id": "a", "function": {"name": "f", "arguments": "{}"}}],
             [{"index": None, "id": "b", "function": {"name": "g", "arguments": "{}"}}]],
            id="whole calls, index null",
        ),
        pytest.param(
            [[{"id": "a", "function": {"name": "f", "arguments": "{"}}], [{"function": {"arguments": "}"}}],
             [{"id": "b", "function": {"name": "g", "arguments": "{}"}}]],
            id="no index at all",
        ),
        pytest.param(
            [[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}],
             [{"index": 0, "id": "b", "function": {"name": "g", "arguments": "{}"}}]],
            id="every call has index 0",
        ),
        pytest.param(
            [[{"index": 0, "id": "a", "function": {"name": "f", "arguments": {}}},
              {"index": 1, "id": "b", "function": {"name": "g", "arguments": {}}}]],
            id="all calls in one chunk, arguments as objects",
        ),
        pytest.param(
            [[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}],
             [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{"}}],
             [{"index": 0, "id": "", "function": {"name": "", "arguments": "}"}}],
             [{"index": 1, "id": None, "function": {"name": None, "arguments": "}"}}]],
            id="interleaved, with empty ids and names",
        ),
        pytest.param(
            [[{"index": 7, "id": "a", "function": {"name": "f", "arguments": "{"}}],
             [{"index": 7, "id": "a", "function": {"name": "f", "arguments": "}"}}],
             [{"index": 3, "id": "b", "function": {"name": "g", "arguments": "{}"}}]],
            id="ids and names repeated, any indices",
        ),
    ],
)  # fmt: skip
def test_servers_that_number_calls_their_own_way(deltas: list[Any]) -> None:
    """Streamed calls are assembled correctly, however a compatible server numbers them."""
    _, reply = assemble([{"tool_calls": each} for each in deltas])
    assert reply.tool_calls == (ToolCall("a", "f", "{}"), ToolCall("b", "g", "{}"))


@pytest.mark.parametrize(
    ("reasons", "kept"),
    [
        (["length", "stop"], "length"),
        (["SAFETY", "tool_calls"], "content_filter"),
        (["stop", "length"], "length"),
        (["length", "content_filter"], "content_filter"),
        (["null", None, "stop"], "stop"),
    ],
)
def test_a_proper_end_does_not_replace_an_improper_one(reasons: list[str | None], kept: str) -> None:
    """Some servers close a stream that was cut off with one more reason, `stop`. Its calls must not run."""
    assembler = ReplyAssembler()
    for reason in reasons:
        fragment = {"index": 0, "delta": {"content": "half"}, "finish_reason": reason}
        assembler.feed(chunk([fragment]))
    assert assembler.finish()[1].stop_reason == kept


def test_calls_without_ids_get_some() -> None:
    """Calls without ids get distinct ids, because a result refers to its call by the id."""
    fragments = [{"function": {"name": "f", "arguments": "{}"}}, {"function": {"name": "f", "arguments": "{}"}}]
    _, reply = assemble([{"tool_calls": [each]} for each in fragments])
    assert len({call.id for call in reply.tool_calls}) == 2


def test_a_repeated_id_in_one_reply_becomes_unique() -> None:
    """A repeated call id is made unique, because two calls with one id would share one result."""
    fragments = [{"index": at, "id": "same", "function": {"name": "f", "arguments": "{}"}} for at in range(2)]
    _, reply = assemble([{"tool_calls": fragments}])
    assert [call.id for call in reply.tool_calls] == ["same", "same_2"]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), _json_of, max_leaves=8))
def test_no_chunk_breaks_the_assembly(value: object) -> None:
    """Chunks with any JSON do not raise an error, and the assembler still returns a reply."""
    assembler = ReplyAssembler()
    for delta in (value, {"tool_calls": value}, {"tool_calls": [value]}, {"tool_calls": [{"function": value}]}):
        assembler.feed({"choices": [{"delta": delta}], "usage": value, "model": value})
    assembler.feed({"choices": value})
    assembler.feed({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]})
    assert json.dumps(assembler.finish()[1].content)


def assemble(deltas: Sequence[Any]) -> tuple[str, ModelReply]:
    """The streamed text and the reply for these deltas."""
    assembler = ReplyAssembler()
    streamed = [assembler.feed(chunk([{"index": 0, "delta": delta, "finish_reason": None}])) for delta in deltas]
    assembler.feed(chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    rest, reply = assembler.finish()
    return "".join(streamed) + rest, reply


def test_the_prompts_of_a_conversation_have_one_key() -> None:
    """OpenAI's own server gets it, others only if the endpoint's settings say so. A refused key is left out."""
    request = ModelRequest((Message(Role.SYSTEM, "You help."), Message(Role.USER, "hi")), cache_key="a session")
    assert CACHE_KEY not in request_body("m", request)
    quirks = Quirks(caches=True)
    body = request_body("m", request, quirks)
    assert body[CACHE_KEY] == "a session"
    found = adapted(
        quirks, ProviderFailure(400, None, "unrecognized argument: prompt_cache_key", {}), body, WIRE.required
    )
    assert found is not None
    assert CACHE_KEY not in request_body("m", request, found.quirks)


@pytest.mark.parametrize(
    ("url", "caches", "sends"),
    [
        ("https://api.openai.com/v1", None, True),
        ("https://api.openai.com/v1", False, False),
        ("http://gpu-1:8000/v1", None, False),
        ("http://gateway:8000/v1", True, True),
    ],
)
def test_the_option_of_caches_is_for_servers_that_have_it(url: str, *, caches: bool | None, sends: bool) -> None:
    """By default, the vendor's own."""
    assert Endpoint("there", url, caches=caches).quirks_of("gpt-5").caches is sends


def test_what_lasts_is_sent_first() -> None:
    """The system prompt is one message. A note has its own, or begins the user's message where a server wants it so."""
    said = (
        Message(Role.SYSTEM, "You help."), Message(Role.SYSTEM, "The user likes tea."), Message(Role.USER, "hello"),
        Message(Role.ASSISTANT, "Hi."), Message(Role.SYSTEM, "It is noon."), Message(Role.USER, "What time is it?"),
    )  # fmt: skip
    request = ModelRequest(said, (ToolSchema("clock", "", {"type": "object"}),))
    body = request_body("m", request)
    lasting = [("system", "You help.\n\nThe user likes tea."), ("user", "hello"), ("assistant", "Hi.")]
    assert _spoken(body) == [*lasting, ("system", "It is noon."), ("user", "What time is it?")]
    assert list(body)[-2:] == ["tools", "messages"]
    within = request_body("m", request, Quirks(notes_within=True))
    assert _spoken(within) == [*lasting, ("user", "It is noon.\n\nWhat time is it?")]


def _spoken(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in body["messages"]]


def test_a_note_moves_the_places_of_files() -> None:
    """A file is sent in place of the line that describes it."""
    file = Attachment("image/png", None, 0, 5, b"png")
    said = (Message(Role.SYSTEM, "It is noon."), Message(Role.USER, "[cat] Who is it?", files=(file,)))
    prompt = placed((Message(Role.USER, "hello"), *said), within=True)
    [moved] = prompt.messages[-1].files
    assert prompt.messages[-1].content[moved.start : moved.end] == "[cat]"
