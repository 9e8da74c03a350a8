"""Servers that speak Chat Completions in their own way, as reports in public trackers describe them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import UUID

import pytest

from perdure.clock import SystemClock
from perdure.errors import ContextTooLong, InvalidResponse, PerdureError, ProviderError, RateLimited
from perdure.models.endings import ended_properly
from perdure.models.endpoints import ANTHROPIC
from perdure.models.protocol import (
    CallAborted,
    Message,
    ModelCall,
    ModelReply,
    ModelRequest,
    Opaque,
    Role,
    ToolCall,
    ToolSchema,
    Usage,
)
from perdure.models.providers.endpoint import Endpoint, Quirks
from perdure.models.providers.model import Client, EndpointModel
from perdure.testing.suites.models import QUESTION, ask, new_call, turn
from perdure.turns.transcript import Entry, reply_entry
from tests.models.anthropic_server import AnthropicServer
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, Chunks, OpenAIServer, Raw, Status, Step, chunk
from tests.models.server import Wire

STOP = chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
FOREIGN = (
    QUESTION,
    Message(Role.ASSISTANT, "", (ToolCall("functions.calculator:0", "calculator", '{"expression": "1"}'),)),
    Message(Role.TOOL, "1", tool_call_id="functions.calculator:0"),
)
"""A conversation in which another provider has called a tool."""


class Lenient(OpenAIServer):
    """A server that accepts every request, such as ids of any form."""

    def judge(self, path: str, body: Wire) -> Status | None:
        return None


@pytest.fixture
def lenient() -> Iterator[Lenient]:
    with Lenient() as running:
        yield running


def deltas(*each: Wire, end: Wire = STOP, **members: Any) -> Chunks:
    """A stream with these deltas. `members` are members of each chunk."""
    return Chunks([*[{**chunk([{"index": 0, "delta": delta}]), **members} for delta in each], end])


def fragment(arguments: Any, **members: Any) -> dict[str, Any]:
    """A delta with one fragment of a tool call."""
    name = members.pop("name", None)
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{"function": function, **members}]}


def streamed(model: EndpointModel, *messages: Message) -> tuple[str, ModelReply]:
    """The text that a model reports, and its reply."""
    texts = list[str]()
    reply = ask(model, *(messages or (QUESTION,)), call=ModelCall(SystemClock(), 30.0, texts.append))
    return "".join(texts), reply


# --- what a provider needs back


def test_a_signature_of_a_tool_call_comes_back(lenient: Lenient) -> None:
    """Gemini refuses a tool call whose thought signature is missing. Its ids may have any form and length."""
    signature = {"extra_content": {"google": {"thought_signature": "c2ln"}}}
    given = "function-call-" + "1234567890" * 5
    lenient.script(deltas(fragment('{"expression": "2"}', name="calculator", id=given, index=0, **signature)))
    turn(model_of(lenient, "gemini-3-pro"), QUESTION)
    call = lenient.requests[1]["messages"][2]["tool_calls"][0]
    assert (call["id"], call["extra_content"]) == (given, signature["extra_content"])
    assert lenient.requests[1]["messages"][3]["tool_call_id"] == given


def test_thoughts_come_back_beside_a_tool_call(server: OpenAIServer) -> None:
    """DeepSeek and Kimi refuse a message with calls whose `reasoning_content` is missing."""
    server.script(
        deltas(
            {"role": "assistant", "content": None, "reasoning_content": ""},
            {"content": None, "reasoning_content": "Let me "},
            {"reasoning_content": "see."},
            fragment('{"expression": "2"}', name="calculator", id="functions.calculator:0", index=0),
        )
    )
    conversation = turn(model_of(server, "kimi-k2"), QUESTION)
    sent = server.requests[1]["messages"][2]
    assert sent["reasoning_content"] == "Let me see."
    assert sent["content"] == ""
    assert sent["tool_calls"][0]["id"] == "functions.calculator:0"
    assert "see" not in conversation[-1].content


def test_details_of_reasoning_are_assembled(server: OpenAIServer) -> None:
    """OpenRouter streams the items of `reasoning_details` in pieces, and wants them back as a whole and in order."""

    def detail(text: str | None, **members: Any) -> dict[str, Any]:
        item = {"type": "reasoning.text", "text": text, "index": 0, "format": "anthropic-claude-v1", **members}
        return {"content": "", "reasoning": text, "reasoning_details": [item]}

    encrypted = [{"type": "reasoning.encrypted", "data": data, "id": data} for data in ("ZA==", "ZQ==")]
    server.script(
        deltas(
            detail("Step "),
            detail("one."),
            detail("", signature="c2ln"),
            detail("Two."),
            *[{"reasoning_details": [each]} for each in encrypted],
            {"content": "Done."},
        )
    )
    model = model_of(server, "anthropic/claude-sonnet-5")
    reply = ask(model, QUESTION)
    assert (reply.content, reply.thoughts) == ("Done.", "Step one.Two.")
    ask(model, QUESTION, Message(Role.ASSISTANT, reply.content, opaque=reply.opaque), QUESTION)
    sent = server.requests[1]["messages"][2]
    assert sent["reasoning"] == "Step one.Two."
    first, second, *others = sent["reasoning_details"]
    assert (first["text"], first["signature"]) == ("Step one.", "c2ln")
    assert (second["text"], second.get("signature")) == ("Two.", None)
    assert others == encrypted


def test_nothing_goes_to_another_endpoint_or_family(server: OpenAIServer) -> None:
    """Another provider, and another model of the same one, get neither the thoughts nor the signatures."""
    server.script(
        deltas(
            {"reasoning_content": "secret thoughts", "unknown": {"a": 1}},
            fragment("{}", name="clock", id="a", index=0, extra_content={"signature": "secret"}),
        )
    )
    reply = ask(model_of(server, "m-1"), QUESTION)
    assert reply.opaque is not None
    answered = Message(Role.ASSISTANT, reply.content, reply.tool_calls, opaque=reply.opaque)
    conversation = (QUESTION, answered, Message(Role.TOOL, "12", tool_call_id="a"))
    for other in (model_of(server, "m-2"), model_of(server, "m-1", "elsewhere")):
        ask(other, *conversation)
        assert "secret" not in json.dumps(server.requests[-1])
        assert "unknown" not in json.dumps(server.requests[-1])
    ask(model_of(server, "vendor/m-1-2026-01-01"), *conversation)
    assert server.requests[-1]["messages"][2]["unknown"] == {"a": 1}


def test_two_servers_behind_one_variable_are_two_endpoints(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OPENAI_BASE_URL` may name another server tomorrow, which must not get the first one's parts."""
    with OpenAIServer() as other:
        one, two = (model_of(each, "m", "openai") for each in (server, other))
        server.script(deltas({"reasoning_content": "secret", "content": "Yes."}))
        reply = ask(one, QUESTION)
        ask(two, QUESTION, Message(Role.ASSISTANT, reply.content, opaque=reply.opaque), QUESTION)
        assert "secret" not in json.dumps(other.requests[0])


def test_what_cannot_be_stored_is_replaced(server: OpenAIServer) -> None:
    """PostgreSQL stores neither NUL nor lone surrogates, and JSON has no NaN."""
    body = '{"choices": [{"delta": {"content": "x", "odd": ["\\u0000", "\\ud83d", NaN, {"\\u0000": 1}]}}]}'
    end = json.dumps(STOP)
    server.script(Raw(f"data: {body}\n\ndata: {end}\n\ndata: [DONE]\n\n".encode()))
    reply = ask(model_of(server), QUESTION)
    assert reply.opaque is not None
    assert reply.opaque.parts["message"]["odd"] == ["\ufffd", "\ufffd", None, {"\ufffd": 1}]


def test_calls_of_another_provider_get_what_a_server_requires(
    server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A conversation that begins with another provider goes on with DeepSeek, and with Gemini."""
    missing = Status(400, message="Missing `reasoning_content` field in the assistant message at message index 2.")
    unsigned = Status(400, message="Function call is missing a thought_signature in functionCall parts.")
    server.script(missing, Answer("yes"), unsigned, Answer("yes"))
    assert ask(model_of(server, "deepseek-reasoner"), *FOREIGN).content == "yes"
    assert server.requests[1]["messages"][2]["reasoning_content"] == ""
    assert ask(model_of(server, "gemini-3-pro"), *FOREIGN).content == "yes"
    call = server.requests[3]["messages"][2]["tool_calls"][0]
    assert call["extra_content"]["google"]["thought_signature"] == "skip_thought_signature_validator"
    assert "refused replies without thought_signature" in caplog.text


@pytest.mark.parametrize("parts", [{"calls": [1], "message": 2}, {"calls": {"a": "b"}}, {"message": {"blocks": [3]}}])
def test_parts_of_another_form_are_left_out(server: OpenAIServer, parts: Wire) -> None:
    """Another adapter for the same model may have stored its parts in a form of its own."""
    called = (ToolCall("a", "calculator", TWO),)
    said = Message(Role.ASSISTANT, "", called, opaque=Opaque("there", "test-model", parts))
    conversation = (QUESTION, said, Message(Role.TOOL, "2", tool_call_id="a"))
    assert ask(model_of(server), *conversation).content
    with AnthropicServer() as other:
        assert ask(model_of(other, kind=ANTHROPIC), *conversation).content


def test_a_conversation_goes_on_with_another_account(server: OpenAIServer) -> None:
    """A server refuses signatures that it does not know. One request goes without; the next may have known ones."""
    refusal = Status(400, message="Corrupted thought signature.")
    server.script(refusal, Answer("a"), Answer("b"))
    model = model_of(server)
    said = Message(Role.ASSISTANT, "No.", opaque=Opaque("there", "test-model", {"message": {"extra": "c2ln"}}))
    for _ in range(2):
        ask(model, QUESTION, said, QUESTION)
    assert ["extra" in each["messages"][2] for each in server.requests] == [True, False, True]


# --- ids


@pytest.mark.parametrize(("name", "refusals"), [("mistral-large", 0), ("unknown", 1)])
def test_ids_fit_what_the_next_provider_accepts(server: OpenAIServer, name: str, refusals: int) -> None:
    """Mistral accepts ids of nine letters and digits only. Another server may say so when it refuses an id."""
    refusal = Status(400, message="Tool call id was x but must be a-z, A-Z, 0-9, with a length of 9.")
    server.script(*[refusal] * refusals, *[Answer("yes")] * 2)
    model = model_of(server, name)
    for _ in range(2):
        ask(model, *FOREIGN)
    sent = [each["messages"][2]["tool_calls"][0]["id"] for each in server.requests[refusals:]]
    assert len(sent[0]) == 9
    assert sent[0].isalnum()
    assert sent[0] == sent[1], "the same id each time, for the provider's cache"
    assert server.requests[-1]["messages"][3]["tool_call_id"] == sent[0]


def test_a_server_may_refuse_ids_that_it_gave(server: OpenAIServer) -> None:
    """Servers of local models give ids that the templates of Mistral's models refuse."""
    refusal = Status(400, message="Tool call id was call_ab12 but must be a-z, A-Z, 0-9, with a length of 9.")
    server.script(deltas(fragment(TWO, name="calculator", id="call_ab12", index=0)), refusal, Answer("yes"))
    turn(model_of(server, "mistral-small"), QUESTION)
    sent = server.requests[2]["messages"]
    assert len(sent[2]["tool_calls"][0]["id"]) == 9
    assert sent[2]["tool_calls"][0]["id"] == sent[3]["tool_call_id"] != "call_ab12"


def test_ids_that_a_server_gives_against_its_own_form_come_back(server: OpenAIServer) -> None:
    """Ollama serves Mistral's models with ids of its own."""
    server.script(deltas(fragment('{"expression": "2"}', name="calculator", id="call_ab12", index=0)))
    turn(model_of(server, "mistral-small"), QUESTION)
    assert server.requests[1]["messages"][2]["tool_calls"][0]["id"] == "call_ab12"


# --- thoughts in tags


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("<think>Hm, 1 < 2.</think>\n\nYes.", "Hm, 1 < 2.", "Yes."),
        ("\n<thinking>a</think>b</thinking> Yes.", "a</think>b", "Yes."),
        ("<think></think>Yes.", "", "Yes."),
        ("<think>a</think>\n<think>b</think>Yes.", "ab", "Yes."),
        ("  The tag <think> begins thoughts.</think>", "", "  The tag <think> begins thoughts.</think>"),
        ("<thin", "", "<thin"),
        ("<b>Yes.</b>", "", "<b>Yes.</b>"),
    ],
)
def test_thoughts_in_tags_are_no_text(server: OpenAIServer, size: int, text: str, thoughts: str, content: str) -> None:
    """A tag may be split at any character. Only tags at the beginning are thoughts."""
    server.script(Answer(text, piece=size))
    shown, reply = streamed(model_of(server))
    assert (shown, reply.content, reply.thoughts) == (content, content, thoughts)


@pytest.mark.parametrize(("reason", "call"), [("length", False), ("stop", True)])
def test_thoughts_without_a_closing_tag_are_thoughts(server: OpenAIServer, reason: str, *, call: bool) -> None:
    """A reply that was cut off within its thoughts has no text, and a call may follow thoughts that were not closed."""
    calls = [Call("clock")] if call else []
    server.script(Answer("<think>never clos</thi", calls=calls, finish_reason=reason))
    model = model_of(server)
    if call:
        reply = ask(model, QUESTION)
        assert (reply.content, reply.thoughts) == ("", "never clos</thi")
    else:
        with pytest.raises(PerdureError, match="limit of tokens"):
            ask(model, QUESTION)


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("Hm.</think>\n\nYes.", "Hm.", "Yes."),
        ("<think>Hm.</think>\n\nYes.", "Hm.", "Yes."),
        ("Just yes.", "", "Just yes."),
    ],
)
def test_a_server_may_omit_the_opening_tag(
    server: OpenAIServer, size: int, text: str, thoughts: str, content: str
) -> None:
    """The chat templates of some models write the opening tag into the prompt."""
    server.script(Answer(text, piece=size))
    shown, reply = streamed(model_of(server, thinks=True))
    assert (shown, reply.content, reply.thoughts) == (content, content, thoughts)


def test_the_same_thoughts_in_two_members_are_counted_once(server: OpenAIServer) -> None:
    """VLLM sends `reasoning` and, for older clients, the same as `reasoning_content`."""
    server.script(deltas({"reasoning": "Hm.", "reasoning_content": "Hm."}, {"content": "Yes."}))
    shown, reply = streamed(model_of(server))
    assert (shown, reply.thoughts) == ("Yes.", "Hm.")


# --- text and calls


def test_content_may_be_a_list_of_parts(lenient: Lenient) -> None:
    """Mistral streams parts of text, and of thoughts, which come back as they were."""
    thinking = [{"type": "thinking", "thinking": [{"type": "text", "text": each}]} for each in ("H", "m.")]
    lenient.script(
        deltas(
            *[{"content": [each]} for each in thinking],
            {"content": [{"type": "text", "text": "Yes"}]},
            {"content": "."},
        )
    )
    model = model_of(lenient, "magistral-small")
    shown, reply = streamed(model)
    assert (shown, reply.content, reply.thoughts) == ("Yes.", "Yes.", "Hm.")
    ask(model, QUESTION, Message(Role.ASSISTANT, reply.content, opaque=reply.opaque), QUESTION)
    assert lenient.requests[1]["messages"][2]["content"] == [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "text", "text": "Yes."},
    ]


ONE, TWO = '{"expression": "1"}', '{"expression": "2"}'


@pytest.mark.parametrize(
    "fragments",
    [
        pytest.param(
            [fragment(ONE, name="calculator", index=0), fragment(TWO, name="calculator", index=0)], id="whole"
        ),
        pytest.param(
            [
                fragment("", name="calculator", index=0),
                fragment(ONE[:9], index=0),
                fragment(ONE[9:], index=0),
                fragment(TWO[:9], name="calculator", index=0),
                fragment(TWO[9:], index=0),
            ],
            id="in pieces",
        ),
        pytest.param(
            [fragment(ONE, name="calculator"), fragment(TWO[:9], name="calculator"), fragment(TWO[9:])], id="no index"
        ),
        pytest.param(
            [
                fragment(ONE, name="calculator", index=0, id="a"),
                fragment(TWO[:9], name="calculator", index=0, id="b"),
                fragment(TWO[9:], index=0),
            ],
            id="ids",
        ),
        pytest.param(
            [
                fragment(json.loads(ONE), name="calculator", index=0),
                fragment(json.loads(TWO), name="calculator", index=0),
            ],
            id="arguments as objects",
        ),
    ],
)
def test_parallel_calls_with_one_index_are_told_apart(server: OpenAIServer, fragments: list[Wire]) -> None:
    """Ollama and others give each parallel call the index 0, or none, and some give no ids."""
    server.script(deltas(*fragments))
    reply = ask(model_of(server), QUESTION)
    assert [call.name for call in reply.tool_calls] == ["calculator", "calculator"]
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [json.loads(ONE), json.loads(TWO)]
    assert len({call.id for call in reply.tool_calls}) == 2


def test_calls_of_two_tools_without_arguments_are_told_apart(server: OpenAIServer) -> None:
    """A call without arguments is followed by a call of another tool with the same index."""
    server.script(deltas(fragment("", name="clock", index=0), fragment(ONE, name="calculator", index=0)))
    assert [call.name for call in ask(model_of(server), QUESTION).tool_calls] == ["clock", "calculator"]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([TWO[:5], TWO[:9], TWO, TWO], id="cumulative"),
        pytest.param(["", TWO[:9], TWO[9:], TWO], id="whole at the end"),
        pytest.param([TWO[:9], TWO[9:]], id="incremental"),
        pytest.param(['{"expression": "', "{}", '2"}'], id="a piece that is an object"),
    ],
)
def test_repeated_arguments_are_recognised(server: OpenAIServer, pieces: list[str]) -> None:
    """Some servers repeat what they have sent in each fragment, or the whole in the last."""
    server.script(deltas(*[fragment(each, name="calculator", id="a", index=0) for each in pieces]))
    (call,) = ask(model_of(server), QUESTION).tool_calls
    assert json.loads(call.arguments)["expression"] in ("2", "{}2")


def test_a_call_in_the_old_form(server: OpenAIServer) -> None:
    """Older servers send one `function_call`."""
    server.script(
        deltas(
            {"function_call": {"name": "calculator", "arguments": TWO[:4]}}, {"function_call": {"arguments": TWO[4:]}}
        )
    )
    (call,) = ask(model_of(server), QUESTION).tool_calls
    assert (call.name, call.arguments) == ("calculator", TWO)


def test_text_and_calls_as_two_choices(server: OpenAIServer) -> None:
    """GitHub's proxy sends the text and the calls of one reply as two choices without an index."""
    call = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": TWO}}
    choices = [
        {"finish_reason": "tool_calls", "message": {"role": "assistant", "content": "Wait."}},
        {"finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [call]}},
    ]
    server.script(Raw(json.dumps({"choices": choices}).encode(), "application/json"))
    reply = ask(model_of(server), QUESTION)
    assert (reply.content, [each.id for each in reply.tool_calls]) == ("Wait.", ["a"])


@pytest.mark.parametrize(("content", "name"), [("", "calculator"), ("Wait.", "calculator")])
def test_a_message_with_calls_has_a_text(server: OpenAIServer, content: str, name: str) -> None:
    """llama.cpp's Python server fails on `content: null`."""
    call = ToolCall("a", name, TWO)
    ask(
        model_of(server), QUESTION, Message(Role.ASSISTANT, content, (call,)), Message(Role.TOOL, "2", tool_call_id="a")
    )
    assert server.requests[0]["messages"][2]["content"] == content


# --- the stream


def test_whole_json_is_read_as_the_reply(server: OpenAIServer) -> None:
    """A server or a proxy that does not stream sends the reply as JSON, under any content type."""
    calls = [Call("calculator", ONE, "a"), Call("calculator", TWO, "a")]
    for content_type in ("application/json", "text/event-stream"):
        body = json.dumps(server.whole(Answer("<think>Hm.</think>Yes.", calls=calls), "m")).encode()
        server.script(Raw(body, content_type))
        shown, reply = streamed(model_of(server))
        assert (shown, reply.thoughts, reply.content) == ("Yes.", "Hm.", "Yes.")
        assert [json.loads(each.arguments) for each in reply.tool_calls] == [json.loads(ONE), json.loads(TWO)]
        assert reply.usage == Usage(11, 7)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n"])
def test_lines_may_end_in_any_way(server: OpenAIServer, end: bytes) -> None:
    """Comments keep a connection open, an event may have a name and an id, and the last blank line may be missing."""
    events = [
        b": OPENROUTER PROCESSING",
        b"event: message\nid: 1\nretry: 5\ndata:" + json.dumps(chunk([{"delta": {"content": "Yes."}}])).encode(),
    ]
    body = b"\xef\xbb\xbf" + (b"\n\n" if end == b"\n" else end).join([*events, b"data: " + json.dumps(STOP).encode()])
    server.script(Raw(body + (b"" if end == b"\n" else end)))
    assert ask(model_of(server), QUESTION).content == "Yes."


@pytest.mark.parametrize("done", [True, False])
def test_a_stream_without_a_finish_is_no_reply(server: OpenAIServer, *, done: bool) -> None:
    """Text without a finish reason may have been cut off anywhere, also before `[DONE]`."""
    fragment_of_call = fragment('{"expression": "2"}', name="calculator", id="a", index=0)
    server.script(
        Chunks(
            [
                chunk([{"index": 0, "delta": each, "finish_reason": None}])
                for each in ({"content": "Yes"}, fragment_of_call)
            ],
            done=done,
        )
    )
    with pytest.raises(InvalidResponse, match="before it was finished"):
        ask(model_of(server), QUESTION)


def test_the_reason_may_come_last_and_beside_the_usage(server: OpenAIServer) -> None:
    """Some servers send an empty reason until the end, no role, chunks without choices, and several choices."""
    texts = [chunk([{"index": 0, "delta": {"content": each}, "finish_reason": ""}]) for each in ("Y", "es")]
    other = chunk([{"index": 0, "delta": {"content": "."}}, {"index": 1, "delta": {"content": "No"}}])
    last = {
        **chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    server.script(Chunks([{"choices": []}, *texts, other, last]))
    reply = ask(model_of(server), QUESTION)
    assert (reply.content, reply.usage, reply.stop_reason) == ("Yes.", Usage(1, 2), "stop")


def test_calls_that_end_with_stop_run(server: OpenAIServer) -> None:
    """Many servers end a reply with calls with `stop`."""
    server.script(Answer(calls=[Call("clock")], finish_reason="stop"))
    assert ended_properly(ask(model_of(server), QUESTION))


# --- usage


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2}},
            Usage(11, 7, 3, 2),
        ),
        ({"prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 7}, Usage(11, 7, 4)),
        ({"cached_tokens": 0, "completion_tokens_details": {"reasoning_tokens": 0}}, Usage(11, 7, 0, 0)),
        ({}, Usage(11, 7)),
    ],
)
def test_usage_has_cached_and_reasoning_tokens(server: OpenAIServer, usage: Wire, expected: Usage) -> None:
    """Servers name the cached tokens differently. What a server does not report is `None`."""
    server.script(Answer("Yes.", usage={"prompt_tokens": 11, "completion_tokens": 7, **usage}))
    assert ask(model_of(server), QUESTION).usage == expected


@pytest.mark.parametrize(
    "place",
    [
        lambda usage: {"usage": usage},
        lambda usage: {"x_groq": {"usage": usage}},
        lambda usage: {"choices": [{"index": 0, "delta": {"content": "x"}, "usage": usage}]},
    ],
    ids=["each chunk", "Groq", "Kimi"],
)
def test_usage_in_each_chunk_is_not_summed(server: OpenAIServer, place: Callable[[Wire], Wire]) -> None:
    """The last usage counts, wherever the server puts it."""
    text = chunk([{"index": 0, "delta": {"content": "x"}}])
    usages = [{"prompt_tokens": 5, "completion_tokens": at} for at in (1, 2, 3)]
    server.script(Chunks([*[{**text, **place(each)} for each in usages], {**STOP, "usage": None}]))
    assert ask(model_of(server), QUESTION).usage == Usage(5, 3)


# --- refusals


UNKNOWN = {
    "detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "Not permitted", "input": {}}]
}


def refused(body: Any, status: int = 422) -> Raw:
    """A refusal with this JSON."""
    return Raw(json.dumps(body).encode(), "application/json", status=status)


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(refused(UNKNOWN), id="FastAPI"),
        pytest.param(refused({"object": "error", "message": UNKNOWN}), id="Mistral"),
        pytest.param(Status(400, message="Unrecognized request argument supplied: stream_options"), id="OpenAI"),
        pytest.param(Raw(b"unknown field `stream_options`, expected `model`", "text/plain", status=422), id="Rust"),
        pytest.param(refused({"error": {"message": "stream_options: no", "code": 400}}, 200), id="under status 200"),
    ],
)
def test_a_refused_option_is_left_out_from_then_on(
    server: OpenAIServer, refusal: Step, caplog: pytest.LogCaptureFixture
) -> None:
    """The call goes on at once without the option, the next ones omit it, and the log names it."""
    server.script(refusal, Answer("Yes."), Answer("Yes."))
    model = model_of(server)
    with caplog.at_level(logging.WARNING):
        assert [ask(model, QUESTION).content for _ in range(2)] == ["Yes.", "Yes."]
    assert ["stream_options" in each for each in server.requests] == [True, False, False]
    assert "there:test-model refused stream_options" in caplog.text


def test_an_invalid_option_may_be_the_servers_failure(server: OpenAIServer) -> None:
    """llama.cpp's Python server refuses the form of a reply under status 500, as others report a failure."""
    said = (
        "1 validation error:\n  {'type': 'literal_error', 'loc': ('body', 'response_format', 'type'), 'msg': \"Input "
        "should be 'text' or 'json_object'\", 'input': 'json_schema', 'ctx': {'expected': \"'text' or 'json_object'\"}}"
    )
    server.script(Status(500, message=said), Answer("{}"), Status(500, message="response_format: out of memory"))
    model = model_of(server)
    request = ModelRequest((QUESTION,), output={"type": "object"})
    assert model.respond(request, new_call()).content == "{}"
    assert ["response_format" in each for each in server.requests] == [True, False]
    with pytest.raises(ProviderError) as caught:
        model.respond(request, new_call())
    assert caught.value.transient


@pytest.mark.parametrize("promised", [None, 0, 5], ids=["complete", "closed", "broken"])
def test_an_empty_stream_is_requested_again_as_a_whole(server: OpenAIServer, promised: int | None) -> None:
    """llama.cpp's Python server begins a stream before it reads the prompt. If that fails, it closes the connection."""
    empty = Raw(b"", promised=promised)
    whole = {"choices": [{"message": {"content": "Yes."}, "finish_reason": "stop"}]}
    server.script(
        empty,
        Status(400, "context_length_exceeded", "This model's maximum context length is 2048 tokens."),
        empty,
        Raw(json.dumps(whole).encode(), "application/json"),
    )
    model = model_of(server)
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)
    assert ask(model, QUESTION).content == "Yes."
    assert [each["stream"] for each in server.requests] == [True, False] * 2
    assert "stream_options" not in server.requests[1]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, "System message must be at the beginning."),
        (400, "Conversation roles must alternate user/assistant/user/assistant/..."),
        (400, "Unexpected role 'system' after role 'assistant'"),
        (500, "Jinja Exception: After the optional system message, conversation roles must alternate"),
    ],
)
def test_a_note_has_no_message_where_the_server_wants_none(server: OpenAIServer, status: int, said: str) -> None:
    """From the refusal on, a note is the beginning of the user's message, as templates of models for chats want it."""
    server.script(Status(status, message=said), Answer("12"), Answer("12"))
    model = model_of(server)
    note, hello = Message(Role.SYSTEM, "It is noon."), Message(Role.USER, "hello")
    for _ in range(2):
        assert ask(model, hello, Message(Role.ASSISTANT, "Hi."), note, QUESTION).content == "12"
    spoken = [[(each["role"], each["content"]) for each in body["messages"][3:]] for body in server.requests]
    within = [("user", f"It is noon.\n\n{QUESTION.content}")]
    assert spoken == [[("system", "It is noon."), ("user", QUESTION.content)], within, within]


def test_several_options_and_members_may_be_refused(server: OpenAIServer) -> None:
    """A server refuses one after the other. Groq refuses the thoughts that it sent itself."""
    refusals = [
        "Extra inputs: parallel_tool_calls, seed.",
        "`temperature` is not supported",
        "property 'reasoning' is unsupported",
    ]
    server.script(*[Status(400, message=each) for each in refusals], Answer("Yes."))
    model = model_of(server)
    opaque = Opaque("there", "test-model", {"message": {"reasoning": "Hm."}})
    settings = {"seed": 1, "temperature": 0.5, "parallel_tool_calls": False, "top_p": 0.9}
    said = (QUESTION, Message(Role.ASSISTANT, "No.", opaque=opaque), QUESTION)
    tool = ToolSchema("f", "", {"type": "object"})
    assert model.respond(ModelRequest(said, (tool,), settings), new_call()).content == "Yes."
    last = server.requests[-1]
    assert last["top_p"] == 0.9
    assert not last.keys() & {"seed", "temperature", "parallel_tool_calls"}
    assert "reasoning" not in last["messages"][1]


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("max_tokens is too large: 999999.", {"max_tokens": 999_999}),
        ("temperature must be between 0 and 1", {"temperature": 1.5}),
        ("Thinking may not be enabled when tool_choice forces a tool.", {"tool_choice": "required"}),
        ("Requests must stop within your quota.", {"stop_sequences": ["x"]}),
    ],
)
def test_an_option_whose_value_is_refused_is_not_left_out(
    server: OpenAIServer, message: str, settings: dict[str, Any]
) -> None:
    """Without a limit of tokens, later calls would cost more than their agent allows. The turn fails instead."""
    server.script(Status(400, message=message), Answer("Yes."))
    tool = ToolSchema("f", "", {"type": "object"})
    with pytest.raises(ProviderError):
        model_of(server).respond(ModelRequest((QUESTION,), (tool,), settings), new_call())
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("sent", "other"), [("max_tokens", "max_completion_tokens"), ("max_completion_tokens", "max_tokens")]
)
def test_the_limit_of_tokens_has_two_names(server: OpenAIServer, sent: str, other: str) -> None:
    """OpenAI's newer models accept `max_completion_tokens` only, and most other servers `max_tokens`."""
    server.script(Status(400, message=f"Unsupported parameter: '{sent}'. Use '{other}' instead."), Answer("Yes."))
    model = model_of(server, quirks=Quirks(renames={"max_tokens": sent}))
    model.respond(ModelRequest((QUESTION,), settings={"max_tokens": 5}), new_call())
    assert (server.requests[0][sent], server.requests[1][other]) == (5, 5)
    assert sent not in server.requests[1]


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Status(400, message="messages: something else"), ProviderError),
        (Status(400, message="model m does not exist"), ProviderError),
        (Status(400, message="The prompt is too long for max_tokens and stream_options."), ContextTooLong),
        (Status(429, message="stream_options"), RateLimited),
        (Status(401, message="stream_options: missing key"), ProviderError),
        (Status(500, message="stream_options"), ProviderError),
    ],
)
def test_other_refusals_are_not_tried_again(server: OpenAIServer, refusal: Status, kind: type[PerdureError]) -> None:
    """Only a refusal that names an option is met by leaving it out."""
    server.script(refusal)
    with pytest.raises(kind):
        ask(model_of(server), QUESTION)
    assert len(server.requests) == 1


def test_a_refusal_after_some_text_ends_the_call(server: OpenAIServer) -> None:
    """The text was already shown, so that a second reply must not follow it within the call."""
    text = chunk([{"index": 0, "delta": {"content": "Yes"}}])
    server.script(Chunks([text, {"error": {"message": "stream_options: no", "code": 400}}]))
    with pytest.raises(ProviderError):
        ask(model_of(server), QUESTION)
    assert len(server.requests) == 1


def test_a_refusal_that_continues_ends_the_call_and_is_not_remembered(server: OpenAIServer) -> None:
    """What does not help is not left out in later calls."""
    server.script(*[Status(400, message="stream_options: no")] * 2, Answer("Yes."))
    model = model_of(server)
    with pytest.raises(ProviderError):
        ask(model, QUESTION)
    ask(model, QUESTION)
    assert ["stream_options" in each for each in server.requests] == [True, False, True]


@pytest.mark.parametrize(
    "body",
    [
        {"error": "quota exceeded"},
        {"error": {"message": "quota exceeded"}},
        {"error": {"error": {"message": "quota exceeded", "code": 1}}},
        {"object": "error", "message": "quota exceeded", "code": 40001},
        {"detail": "quota exceeded"},
        [{"error": {"message": "quota exceeded", "status": "X"}}],
        {"choices": [], "error": {"message": "quota exceeded", "code": 502}},
    ],
)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_error_under_status_200_is_an_error(
    server: OpenAIServer, body: Any, caplog: pytest.LogCaptureFixture, *, is_streamed: bool
) -> None:
    """The error's cause is in the log, in whatever form the server sends it."""
    server.script(Chunks([body]) if is_streamed else Raw(json.dumps(body).encode(), "application/json"))
    with pytest.raises(ProviderError) as caught:
        ask(model_of(server), QUESTION)
    assert caught.value.transient
    assert "the server sent: quota exceeded" in caplog.text
    assert "quota" not in caught.value.message


@pytest.mark.parametrize(("setting", "shows"), [(True, True), (None, False), (False, False)])
def test_what_cannot_be_read_is_quoted(
    server: OpenAIServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    setting: bool | None,
    shows: bool,
) -> None:
    """The log has the first 200 characters of a server on loopback, and of others if a setting allows it.

    A server may quote what users wrote, which no log may contain by default.
    """
    server.script(Raw(b"<html>It works!" + b"x" * 300, "text/html"))
    monkeypatch.setattr("perdure.models.providers.endpoint.ipaddress.ip_address", _no_address)
    model = model_of(server, show_received=setting)
    with pytest.raises(InvalidResponse) as caught:
        ask(model, QUESTION)
    assert ("the server sent: <html>It works!xx" in caplog.text) is shows
    assert "x" * 200 not in caplog.text
    assert "works" not in caught.value.message
    server.script(Status(400, "odd", message="You said: my secret"))
    with pytest.raises(ProviderError):
        ask(model, QUESTION)
    assert "code odd" in caplog.text
    assert ("my secret" in caplog.text) is shows
    monkeypatch.undo()
    server.script(Raw(b"<html>It works!", "text/html"))
    with pytest.raises(InvalidResponse):
        ask(model_of(server), QUESTION)
    assert "the server sent: <html>It works!" in caplog.text


def _no_address(host: str) -> object:
    raise ValueError(host)


# --- what is sent


def test_schemas_are_made_acceptable(server: OpenAIServer) -> None:
    """Providers refuse objects without `properties`, arrays without `items`, and tuples."""
    parameters: Mapping[str, Any] = {
        "properties": {
            "names": {"type": ["array", "null"]},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "maxItems": 2},
            "points": {"type": "array", "items": {"type": "array", "items": [{"type": "number"}, {"type": "number"}]}},
            "properties": {"anyOf": [{"type": "object"}, {"type": "null"}], "default": {"type": "array"}},
        },
    }
    tools = (ToolSchema("f", "", {"type": "object"}), ToolSchema("g", "", parameters))
    model_of(server).respond(ModelRequest((QUESTION,), tools), new_call())
    plain, rich = [each["function"]["parameters"] for each in server.requests[0]["tools"]]
    assert plain == {"type": "object", "properties": {}}
    assert rich["type"] == "object"
    assert rich["properties"] == {
        "names": {"type": ["array", "null"], "items": {}},
        "pair": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "maxItems": 2},
        "points": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "properties": {"anyOf": [{"type": "object", "properties": {}}, {"type": "null"}], "default": {"type": "array"}},
    }


def test_settings_are_options_of_the_request(server: OpenAIServer) -> None:
    """Settings have the names of pydantic-ai. What the protocol does not have is not sent."""
    settings = {
        "temperature": 0.5, "max_tokens": 9, "stop_sequences": ["x"], "seed": 1, "thinking": "low", "top_k": 5,
        "tool_choice": ["f:1"], "parallel_tool_calls": False, "extra_body": {"min_p": 0.1},
        "extra_headers": {"X-A": "b"},
    }  # fmt: skip
    model = model_of(server, headers={"X-B": "c"})
    model.respond(ModelRequest((QUESTION,), (ToolSchema("f:1", "", {}),), settings), new_call())
    body = server.requests[0]
    expected = {
        "temperature": 0.5, "max_tokens": 9, "stop": ["x"], "seed": 1, "reasoning_effort": "low", "min_p": 0.1,
        "tool_choice": {"type": "function", "function": {"name": "f_1"}}, "parallel_tool_calls": False,
    }  # fmt: skip
    assert body | expected == body
    assert not body.keys() & {"top_k", "extra_body", "stop_sequences", "thinking"}
    assert (server.headers[0]["x-a"], server.headers[0]["x-b"]) == ("b", "c")
    assert settings.keys() - model.supported_settings == {"top_k"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        (["f"], {"type": "function", "function": {"name": "f"}}),
        (
            ["f", "g"],
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": each}} for each in "fg"],
                },
            },
        ),
    ],
)
def test_tools_may_be_chosen(server: OpenAIServer, choice: Any, expected: Any) -> None:
    """The setting `tool_choice` is a mode or names of tools. A request without tools has none."""
    model = model_of(server)
    tools = tuple(ToolSchema(each, "", {}) for each in "fg")
    model.respond(ModelRequest((QUESTION,), tools, {"tool_choice": choice}), new_call())
    model.respond(ModelRequest((QUESTION,), (), {"tool_choice": choice, "parallel_tool_calls": True}), new_call())
    assert server.requests[0]["tool_choice"] == expected
    assert not server.requests[1].keys() & {"tool_choice", "parallel_tool_calls"}


@pytest.mark.parametrize("is_closed", [True, False])
def test_structured_output_is_requested(server: OpenAIServer, *, is_closed: bool) -> None:
    """The provider enforces a schema whose objects name and require all members. A server without it gets none."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    if is_closed:
        schema["additionalProperties"] = False
    server.script(Answer("{}"), Status(400, message="This response_format type is unavailable now"), Answer("{}"))
    request = ModelRequest((QUESTION,), output=schema)
    model = model_of(server)
    for _ in range(2):
        model.respond(request, new_call())
    form = server.requests[0]["response_format"]
    assert (form["type"], form["json_schema"]["schema"], form["json_schema"]["strict"]) == (
        "json_schema",
        schema,
        is_closed,
    )
    assert "response_format" not in server.requests[2]


def test_a_conversation_goes_on_after_each_change_of_provider(server: OpenAIServer) -> None:
    """Opaque parts of two providers lie in one conversation, and each gets its own."""
    one, two = model_of(server, "kimi-k2", "kimi"), model_of(server, "mistral-large", "mistral")
    conversation: list[Message] = [QUESTION]
    for model, secret in ((one, "first"), (two, "second"), (one, "third")):
        server.script(deltas({"reasoning_content": secret}, fragment(TWO, name="calculator", id="call_1", index=0)))
        conversation = [*turn(model, *conversation), QUESTION]
        assert conversation[-2].content
    sent = [each["reasoning_content"] for each in server.requests[-1]["messages"] if "reasoning_content" in each]
    assert sent == ["first", "third"]


def test_a_signature_comes_back_beside_an_id_that_repeats(lenient: Lenient) -> None:
    """The transcript renames a call whose id an earlier call of the turn has. The members of the call stay with it."""
    steps = [
        deltas(fragment(ONE, name="calculator", index=0, id="call_1", extra_content={"signature": each}))
        for each in ("first", "second")
    ]
    lenient.script(*steps, Answer("done"))
    model, turn_id = model_of(lenient, "gemini-3-pro"), UUID(int=1)
    entries = list[Entry]()
    conversation = [QUESTION]
    for _ in steps:
        taken = [call.id for entry in entries for call in entry.tool_calls]
        entries.append(reply_entry(turn_id, ask(model, *conversation), taken))
        conversation.append(entries[-1].message)
        conversation += [Message(Role.TOOL, "1", tool_call_id=call.id) for call in entries[-1].tool_calls]
    ask(model, *conversation)
    sent = [each["tool_calls"][0] for each in lenient.requests[-1]["messages"] if "tool_calls" in each]
    assert [each["extra_content"]["signature"] for each in sent] == ["first", "second"]
    assert len({each["id"] for each in sent}) == 2


def test_a_whole_message_after_the_deltas_is_a_repetition(server: OpenAIServer) -> None:
    """MiniMax repeats the reply as a whole in the last chunk."""
    whole = {"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}
    server.script(deltas({"content": "Hel"}, {"content": "lo."}, end=chunk([whole])))
    text, reply = streamed(model_of(server))
    assert (text, reply.content) == ("Hello.", "Hello.")


def test_a_message_of_null_beside_the_deltas_is_ignored(server: OpenAIServer) -> None:
    fragments = [fragment(ONE[:9], name="calculator", id="a", index=0), fragment(ONE[9:], index=0)]
    server.script(Chunks([*[chunk([{"index": 0, "message": None, "delta": each}]) for each in fragments], STOP]))
    assert [call.arguments for call in ask(model_of(server), QUESTION).tool_calls] == [ONE]


def test_only_the_first_of_two_calls_with_one_index_has_an_id(server: OpenAIServer) -> None:
    server.script(deltas(fragment("{}", name="clock", id="a", index=0), fragment(ONE, name="calculator", index=0)))
    calls = ask(model_of(server), QUESTION).tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("clock", "{}"), ("calculator", ONE)]


def test_a_name_that_is_repeated_without_arguments_begins_no_call(server: OpenAIServer) -> None:
    server.script(deltas(fragment(ONE, name="calculator", index=0), fragment("", name="calculator", index=0)))
    assert [call.arguments for call in ask(model_of(server), QUESTION).tool_calls] == [ONE]


@pytest.mark.parametrize("status", [404, 500, 501])
def test_an_option_may_be_refused_as_a_failure(server: OpenAIServer, status: int) -> None:
    """The server of llama.cpp refuses an option with 500."""
    server.script(Status(status, message="Unsupported param: stream_options"), Answer("yes"))
    assert ask(model_of(server), QUESTION).content == "yes"
    assert "stream_options" not in server.requests[1]


def test_a_failure_that_names_an_option_is_no_refusal(server: OpenAIServer) -> None:
    server.script(Status(500, message="Internal error while reading stream_options"))
    with pytest.raises(ProviderError) as caught:
        ask(model_of(server), QUESTION)
    assert caught.value.transient


@pytest.mark.parametrize(
    ("body", "kind", "transient"),
    [
        ({"message": "bad", "code": 400}, ProviderError, False),
        ({"success": False, "errors": [{"message": "bad", "code": 400}]}, ProviderError, False),
        ({"error": {"message": "slow down", "status": 429}}, RateLimited, True),
    ],
)
def test_more_forms_of_errors_under_200(
    server: OpenAIServer, body: Wire, kind: type[PerdureError], transient: bool
) -> None:
    server.script(Raw(json.dumps(body).encode(), "application/json"))
    with pytest.raises(kind) as caught:
        ask(model_of(server), QUESTION)
    assert caught.value.transient is transient


def test_thoughts_that_are_counted_separately_are_output(server: OpenAIServer) -> None:
    """XAI leaves the tokens of thoughts out of `completion_tokens`, although they cost as much."""
    usage: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 13}
    usage |= {"completion_tokens_details": {"reasoning_tokens": 10}}
    server.script(deltas({"content": "x"}, end={**STOP, "usage": usage}))
    assert ask(model_of(server), QUESTION).usage == Usage(1, 12, None, 10)


def test_thoughts_beside_calls_without_text_have_no_blank_part(server: OpenAIServer) -> None:
    """Mistral's thoughts come back as a part of the content. A blank text beside them would be refused."""
    part = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    server.script(deltas({"content": [part]}, fragment(ONE, name="calculator", id="abcdefghi", index=0)))
    reply = ask(model_of(server), QUESTION)
    answered = Message(Role.ASSISTANT, "", reply.tool_calls, opaque=reply.opaque)
    with Lenient() as lenient:
        ask(model_of(lenient), QUESTION, answered, Message(Role.TOOL, "1", tool_call_id="abcdefghi"))
        assert lenient.requests[0]["messages"][2]["content"] == [part]


def test_the_end_of_a_call_is_not_logged_as_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a cancelled turn's connection looks like the end of a reply, which was not finished."""
    call = new_call()
    client = Client(Endpoint("there", "http://127.0.0.1:1"), "there:m", SystemClock())

    def end() -> None:
        with client.calling(call):
            call.abort()
            raise InvalidResponse("The model's reply ended before it was finished.")

    with pytest.raises(CallAborted):
        end()
    assert "there:m" not in caplog.text


def test_thoughts_that_are_held_back_to_the_end_are_thoughts(server: OpenAIServer) -> None:
    """The beginning of a closing tag is held back until it cannot be one."""
    server.script(deltas({"content": "<think>a</th"}, fragment(ONE, name="calculator", id="a", index=0)))
    assert ask(model_of(server), QUESTION).thoughts == "a</th"


def test_own_ids_that_a_server_refuses_are_shortened(lenient: Lenient) -> None:
    """A gateway passes a request on to another server than before, which refuses the first one's ids."""
    given = "x" * 64
    said = "Invalid 'messages[2].tool_calls[0].id': string too long. Expected a string with maximum length 40, got 64."
    refusal = Status(400, "string_above_max_length", said)
    lenient.script(deltas(fragment(ONE, name="calculator", id=given, index=0)), refusal, Answer("yes"))
    assert turn(model_of(lenient, "auto"), QUESTION)[-1].content == "yes"
    first, second = (request["messages"][2]["tool_calls"][0]["id"] for request in lenient.requests[1:])
    assert (len(first), len(second)) == (64, 40)
    assert lenient.requests[2]["messages"][3]["tool_call_id"] == second


@pytest.mark.parametrize("reason", ["tool-calls", "TOOL_CALLS"])
def test_calls_of_a_reply_that_ends_with_another_spelling_run(server: OpenAIServer, reason: str) -> None:
    """A gateway writes its reasons with hyphens."""
    end = chunk([{"index": 0, "delta": {}, "finish_reason": reason}])
    server.script(deltas(fragment(ONE, name="calculator", id="a", index=0), end=end))
    assert ended_properly(ask(model_of(server), QUESTION))
