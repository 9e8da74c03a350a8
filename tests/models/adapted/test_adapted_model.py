"""What adapted models keep, send back, mend and refuse, beyond the suite of all providers."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.openai import OpenAIProvider

from perdure.clock import SystemClock
from perdure.errors import InvalidResponse, MissingKey, ProviderError, RateLimited, SettingsError
from perdure.models import endings
from perdure.models.adapted import AdaptedModel, adapt_model, adapted_model, event_loop
from perdure.models.adapted.messages import PART
from perdure.models.protocol import (
    CallAborted,
    Message,
    Model,
    ModelCall,
    ModelReply,
    ModelRequest,
    Role,
    ToolCall,
    ToolSchema,
    Usage,
)
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.reply import EMPTY_TEXT
from perdure.models.resolve import resolve
from perdure.settings import Settings
from perdure.testing.suites.models import QUESTION, STATEMENT, ModelSuite, ask, new_call, turn
from tests.models.adapted.test_adapted_suite import BlocksServer, GroqServer, MistralServer, adapted
from tests.models.anthropic_server import THOUGHTS
from tests.models.bedrock_server import SIGNATURE, BedrockServer
from tests.models.gemini_server import GeminiServer, signature_of
from tests.models.openai_server import OpenAIServer, chunk
from tests.models.responses_server import REASONING, ResponsesServer
from tests.models.server import Answer, Call, Chunks, Raw, Status, Wire


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as running:
        yield running


@pytest.fixture
def model(server: OpenAIServer) -> Iterator[AdaptedModel]:
    made = adapted("openai-chat", server.base_url)
    yield made
    made.close()


@pytest.fixture
def gemini() -> Iterator[GeminiServer]:
    with GeminiServer() as running:
        yield running


def deltas(*given: Wire, finish: str | None = "stop") -> Chunks:
    """A stream of these deltas, and a finish."""
    chunks = [chunk([{"index": 0, "delta": delta, "finish_reason": None}]) for delta in given]
    if finish:
        chunks.append(chunk([{"index": 0, "delta": {}, "finish_reason": finish}]))
    return Chunks(chunks)


def streamed(model: Model, *messages: Message) -> tuple[list[str], ModelReply]:
    said: list[str] = []
    reply = ask(model, *messages, call=ModelCall(SystemClock(), 30.0, said.append))
    return said, reply


def spoken(reply: ModelReply) -> Message:
    return Message(Role.ASSISTANT, reply.content, reply.tool_calls, opaque=reply.opaque)


def answered(reply: ModelReply) -> list[Message]:
    return [spoken(reply), *(Message(Role.TOOL, "89", tool_call_id=call.id) for call in reply.tool_calls)]


# --- what a provider needs back


@pytest.mark.parametrize(
    ("name", "made", "said", "signature"),
    [
        pytest.param(
            "google:gemini-3-pro", GeminiServer, "Corrupted thought signature.", signature_of("call_1"), id="Gemini"
        ),
        pytest.param(
            "google:gemini-3-pro", GeminiServer, "Thought signature is not valid..", signature_of("call_1"), id="Vertex"
        ),
        pytest.param(
            "openai-responses:gpt-5",
            ResponsesServer,
            "The encrypted content gAAA...DQ== could not be verified.",
            REASONING["encrypted_content"],
            id="Responses",
        ),
        pytest.param(
            "openai-responses:gpt-5",
            ResponsesServer,
            "Item 'rs_1' of type 'reasoning' was provided without its required following item.",
            REASONING["encrypted_content"],
            id="a place",
        ),
        pytest.param(
            "anthropic:claude-opus-5",
            BlocksServer,
            "messages.1.content.0: Invalid `signature` in `thinking` block",
            THOUGHTS["signature"],
            id="Anthropic",
        ),
        pytest.param(
            "bedrock:us.anthropic.claude-opus-5-20260115-v1:0",
            BedrockServer,
            "messages.1.content.0: Invalid `signature` in `thinking` block",
            SIGNATURE,
            id="Bedrock",
        ),
    ],
)
def test_signatures_that_their_sender_refuses_are_left_out(name: str, made: Any, said: str, signature: str) -> None:
    """Signatures end with an account, a region or a key. The conversation goes on without them."""
    with made() as server:
        url = server.base_url.removesuffix("/v1") if made is BlocksServer else server.base_url
        model = adapted(kind := name.partition(":")[0], url, name.removeprefix(f"{kind}:"))
        server.thinks = True
        reply = ask(model, QUESTION)
        server.thinks = False
        server.script(Status(400, message=said), Answer("89"))
        assert ask(model, QUESTION, *answered(reply), Message(Role.USER, "And now?")).content == "89"
        sent = [json.dumps(each) for each in server.requests]
        assert [f'"{signature}"' in each for each in sent] == [False, True, False]
        assert '"89"' in sent[2]
        model.close()


@pytest.mark.long
def test_a_signature_goes_back_to_its_sender(gemini: GeminiServer) -> None:
    """Gemini refuses a call without the signature with which it sent it."""
    model = adapted("google", gemini.base_url)
    reply = ask(model, QUESTION)
    assert ask(model, QUESTION, *answered(reply)).content.startswith("89")
    assert signature_of("call_1") in json.dumps(gemini.requests[1]["contents"])
    model.close()


def test_a_signature_goes_to_no_other_model(gemini: GeminiServer, model: AdaptedModel, server: OpenAIServer) -> None:
    """After a change of the model, the next provider gets text and calls only, and goes on."""
    google = adapted("google", gemini.base_url)
    gemini.script(Answer("Let me see.", calls=[Call("calculator", '{"expression": "12*7+5"}', "id with spaces!")]))
    reply = ask(google, QUESTION)
    assert reply.opaque is not None
    assert ask(model, QUESTION, *answered(reply)).content.startswith("89")
    sent = json.dumps(server.requests[0])
    assert signature_of("id with spaces!") not in sent
    assert server.requests[0]["messages"][2]["content"] == "Let me see."
    assert server.requests[0]["messages"][2]["tool_calls"][0]["id"] == "id_with_spaces_"
    other = replace(reply, opaque=replace(reply.opaque, family="another"))
    ask(google, QUESTION, *answered(other))
    assert signature_of("id with spaces!") not in json.dumps(gemini.requests[1])
    google.close()


def test_a_signature_goes_to_no_other_server(gemini: GeminiServer) -> None:
    """The environment may direct the vendor's name to another server, which must not get what the first one sent."""
    google = adapted("google", gemini.base_url)
    reply = ask(google, QUESTION)
    google.close()
    with GeminiServer() as second:
        other = adapted("google", second.base_url)
        ask(other, QUESTION, *answered(reply))
        assert signature_of("call_1") not in json.dumps(second.requests[0])
        other.close()


def test_a_signature_goes_to_no_other_model_of_the_vendor(gemini: GeminiServer) -> None:
    """Signatures of one model are not those of another, even if both are called Gemini."""
    gemini.script(Answer("Let me see.", calls=[Call("calculator", '{"expression": "12*7+5"}', "call_1")]))
    endpoint = Endpoint("google", gemini.base_url, "key")
    pro, flash = (
        adapted_model(f"google:{name}", SystemClock(), "PERDURE_MODEL", endpoint, "google")
        for name in ("gemini-3-pro", "gemini-2.5-flash")
    )
    reply = ask(pro, QUESTION)
    with contextlib.suppress(ProviderError):  # the test's server also wants signatures from another model
        ask(flash, QUESTION, *answered(reply))
    assert signature_of("call_1") not in json.dumps(gemini.requests[1])
    pro.close()
    flash.close()


def test_thoughts_are_no_text(model: AdaptedModel, server: OpenAIServer) -> None:
    """Thoughts may be in a member and in tags."""
    server.script(
        deltas({"reasoning_content": "Hm. "}, {"content": "<thi"}, {"content": "nk>So.</think>"}, {"content": "Hi."})
    )
    said, reply = streamed(model, STATEMENT)
    assert ("".join(said), reply.content, reply.thoughts) == ("Hi.", "Hi.", "Hm. So.")


@pytest.mark.parametrize(
    "stored",
    [
        "[",
        "[]",
        '[{"kind": "of the future"}]',
        '[{"kind": "response", "parts": [{"part_kind": "of the future"}]}]',
        '[{"kind": "request", "parts": []}]',
    ],
)
def test_a_response_that_cannot_be_read_is_sent_as_text(model: AdaptedModel, server: OpenAIServer, stored: str) -> None:
    """A newer release of pydantic-ai may have written the row. The conversation goes on without what it cannot read."""
    server.script(deltas({"reasoning_content": "Hm."}, {"content": "Hello."}))
    reply = ask(model, STATEMENT)
    assert reply.opaque is not None
    unreadable = replace(reply, opaque=replace(reply.opaque, parts={PART: stored}))
    ask(model, STATEMENT, spoken(unreadable), QUESTION)
    assert server.requests[1]["messages"][2] == {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize("result", ["", " \n"])
def test_an_empty_result_of_a_tool_is_no_blank_text(result: str) -> None:
    """Bedrock refuses blank texts, also in the result of a tool."""
    with BedrockServer() as server:
        model = adapted("bedrock", server.base_url)
        called = Message(Role.ASSISTANT, "", (ToolCall("a", "look", "{}"),))
        server.script(Answer("Fine."))
        assert ask(model, QUESTION, called, Message(Role.TOOL, result, tool_call_id="a")).content == "Fine."
        [returned] = server.requests[0]["messages"][-1]["content"]
        assert returned["toolResult"]["content"] == [{"text": EMPTY_TEXT}]
        model.close()


def test_an_edited_message_is_sent_as_it_is_now(model: AdaptedModel, server: OpenAIServer) -> None:
    """What was erased from a message does not come back from the stored response."""
    server.script(deltas({"reasoning_content": "Ana!"}, {"content": "Hello Ana."}))
    reply = ask(model, STATEMENT)
    ask(model, STATEMENT, replace(spoken(reply), content="Hello."), QUESTION)
    assert "Ana" not in json.dumps(server.requests[1]["messages"][2:])


def test_reasoning_comes_back_beside_its_call(model: AdaptedModel, server: OpenAIServer) -> None:
    """DeepSeek and Kimi refuse a call without its `reasoning_content`."""
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
    thoughts = {"reasoning_content": "I cal"}, {"reasoning_content": "culate."}
    server.script(deltas(*thoughts, {"tool_calls": [call]}, finish="tool_calls"))
    said, reply = streamed(model, QUESTION)
    assert (said, reply.content, reply.thoughts) == ([], "", "I calculate.")
    ask(model, QUESTION, *answered(reply))
    assert server.requests[1]["messages"][2]["reasoning_content"] == "I calculate."


def test_a_plain_reply_stores_nothing_beside_it(model: AdaptedModel) -> None:
    """Text and calls are in the message already."""
    assert all(message.opaque is None for message in turn(model, QUESTION))


def test_a_repeated_id_of_a_stored_response_becomes_unique(gemini: GeminiServer) -> None:
    """A provider refuses a prompt with a repeated id, so the ids of stored responses are translated, too."""
    model = adapted("google", gemini.base_url)
    first = turn(model, QUESTION)
    assert first[1].opaque is not None
    assert "89" in turn(model, *first, *first, QUESTION)[-1].content
    sent = json.dumps(gemini.requests[-1]["contents"])
    assert sent.count(signature_of("call_1")) == 3
    model.close()


# --- thoughts


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("<think>Let me\nsee.</think>\n\nIt is 89.", "Let me\nsee.", "It is 89."),
        ("\n<think></think>It is 89.", "", "It is 89."),
        ("<thinking>Hm.</thinking>It <is> 89.", "Hm.", "It <is> 89."),
        ("It is <think>89</think>.", "", "It is <think>89</think>."),
        ("<thin ice", "", "<thin ice"),
        ("<think>a < b</thin></think>yes", "a < b</thin>", "yes"),
    ],
)
def test_thoughts_in_tags_are_no_text(  # noqa: PLR0917 (two fixtures and a table)
    model: AdaptedModel, server: OpenAIServer, size: int, text: str, thoughts: str, content: str
) -> None:
    """Tags may be split over deltas in any way. Thoughts are neither streamed, nor stored, nor sent back."""
    server.script(deltas(*({"content": text[at : at + size]} for at in range(0, len(text), size))))
    said, reply = streamed(model, STATEMENT)
    assert ("".join(said), reply.content, reply.thoughts) == (content, content, thoughts)
    ask(model, STATEMENT, spoken(reply), QUESTION)
    assert server.requests[1]["messages"][2]["content"] == content


@pytest.mark.parametrize(
    "pieces",
    [
        ["<think>", "Hm", ".", "</think>", "It ", "is."],
        ["<think>", "Hm.", "</th", "ink>\n", "It is."],
        ["<thi", "nk>Hm.", "</think>", "It is."],
    ],
)
def test_tags_that_pydantic_ai_knows_are_the_same(model: AdaptedModel, server: OpenAIServer, pieces: list[str]) -> None:
    """pydantic-ai itself recognises a tag that is exactly one delta, but not one that is split."""
    server.script(deltas(*({"content": piece} for piece in pieces)))
    said, reply = streamed(model, STATEMENT)
    assert ("".join(said), reply.content, reply.thoughts) == ("It is.", "It is.", "Hm.")
    ask(model, STATEMENT, spoken(reply), QUESTION)
    assert "Hm" not in json.dumps(server.requests[1]["messages"])


def test_a_server_may_omit_the_opening_tag(server: OpenAIServer) -> None:
    """Some templates put the tag into the prompt. `PERDURE_ENDPOINTS__NAME__THINKS` says so."""
    endpoint = Endpoint("mine", server.base_url, "key", thinks=True)
    model = adapted_model("mine:qwen", SystemClock(), "PERDURE_MODEL", endpoint, "openai-chat")
    server.script(deltas({"content": "Hm.</th"}, {"content": "ink>\n"}, {"content": "Hello."}))
    said, reply = streamed(model, STATEMENT)
    assert ("".join(said), reply.content, reply.thoughts) == ("Hello.", "Hello.", "Hm.")
    model.close()


def test_an_unclosed_thought_is_no_reply(model: AdaptedModel, server: OpenAIServer) -> None:
    server.script(deltas({"content": "<think>and so on"}))
    with pytest.raises(InvalidResponse):
        ask(model, STATEMENT)


# --- what servers do


def test_parallel_calls_with_one_index_are_two(model: AdaptedModel, server: OpenAIServer) -> None:
    """Some servers give each call the index 0, and no ids. Their arguments are not glued together."""
    first = {"index": 0, "function": {"name": "calculator", "arguments": '{"expression": "1"}'}}
    second = {"index": 0, "function": {"name": "calculator", "arguments": '{"expression"'}}
    rest = {"index": 0, "function": {"arguments": ': "2"}'}}
    server.script(deltas(*({"tool_calls": [each]} for each in (first, second, rest)), finish="tool_calls"))
    calls = ask(model, QUESTION).tool_calls
    assert [(call.name, call.arguments) for call in calls] == [
        ("calculator", '{"expression": "1"}'),
        ("calculator", '{"expression": "2"}'),
    ]
    assert len({call.id for call in calls}) == 2


def test_content_in_parts_is_text() -> None:
    """Mistral's thinking models stream arrays of parts."""
    with MistralServer() as server:
        model = adapted("mistral", server.base_url.removesuffix("/v1"))
        thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
        server.script(
            deltas({"content": [thinking]}, {"content": [{"type": "text", "text": "It "}]}, {"content": "is."})
        )
        said, reply = streamed(model, STATEMENT)
        assert ("".join(said), reply.content, reply.thoughts) == ("It is.", "It is.", "Hm.")
        model.close()


def test_an_assistant_message_has_content(model: AdaptedModel, server: OpenAIServer) -> None:
    """llama.cpp's Python server fails at `content: null`."""
    turn(model, QUESTION)
    assert server.requests[1]["messages"][2]["content"] == ""


def test_a_refused_option_is_left_out_from_then_on(
    model: AdaptedModel, server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The first call is repeated without the option, and the log names it."""
    server.script(Status(422, message="Extra inputs are not permitted: stream_options"), Answer("hello"))
    assert ask(model, STATEMENT).content == "hello"
    assert "refused stream_options" in caplog.text
    ask(model, STATEMENT)
    assert ["stream_options" in request for request in server.requests] == [True, False, False]


@pytest.mark.parametrize(
    "said", ["messages: unsupported, but model and stream are fine", "max_completion_tokens must be at most 4096"]
)
def test_any_other_refusal_is_not_repeated(model: AdaptedModel, server: OpenAIServer, said: str) -> None:
    """A refused value is the developer's to change, and nothing can be left out of what every request needs."""
    server.script(Status(400, message=said))
    with pytest.raises(ProviderError):
        model.respond(ModelRequest((STATEMENT,), settings={"max_tokens": 9999}), new_call())
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [Answer("hello"), Answer(calls=[Call("clock", id="a"), Call("clock", id="b")])])
def test_a_complete_reply_instead_of_a_stream_is_one(model: AdaptedModel, server: OpenAIServer, answer: Answer) -> None:
    body = json.dumps(server.whole(answer, "test-model")).encode()
    server.script(Raw(body, "application/json"))
    said, reply = streamed(model, QUESTION)
    assert "".join(said) == reply.content == answer.text
    assert [call.id for call in reply.tool_calls] == [call.id for call in answer.calls]
    assert reply.usage == Usage(11, 7)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "slow down", "code": "rate_limit_exceeded"}, RateLimited),
        ({"message": "no such model", "code": 404}, ProviderError),
        ("it broke", ProviderError),
    ],
)
@pytest.mark.parametrize("media_type", ["application/json", "text/event-stream"])
def test_an_error_object_with_status_200_is_an_error(
    model: AdaptedModel, server: OpenAIServer, error: object, kind: type[Exception], media_type: str
) -> None:
    body = json.dumps({"error": error}).encode()
    server.script(Raw(b"data: %s\n\n" % body if media_type == "text/event-stream" else body, media_type))
    with pytest.raises(kind):
        ask(model, STATEMENT)


def test_schemas_have_properties_and_items(gemini: GeminiServer) -> None:
    """Gemini refuses an array without `items`, others an object without `properties`."""
    model = adapted("google", gemini.base_url)
    pair = {"type": "array", "prefixItems": [{"type": "string"}]}
    array = {"type": "object", "properties": {"all": {"type": "array"}, "pair": pair}}
    tools = (ToolSchema("a", "", array), ToolSchema("b", "", {}))
    gemini.script(Answer("hello"))
    assert model.respond(ModelRequest((QUESTION,), tools), new_call()).content == "hello"
    first, second = (each["parameters_json_schema"] for each in gemini.requests[0]["tools"][0]["functionDeclarations"])
    assert first["properties"]["all"] == {"type": "array", "items": {}}
    assert first["properties"]["pair"]["items"] == {"type": "string"}
    assert second == {"type": "object", "properties": {}}
    model.close()


def test_a_call_that_was_cut_off_does_not_run(model: AdaptedModel, server: OpenAIServer) -> None:
    """pydantic-ai's agents run it with the arguments that are there; perdure runs calls of complete replies only."""
    server.script(Answer(calls=[Call("clock", "{}")], finish_reason="length"))
    reply = ask(model, QUESTION)
    assert reply.tool_calls
    assert endings.why_calls_do_not_run(reply)


def test_cached_and_reasoning_tokens_are_counted(model: AdaptedModel, server: OpenAIServer) -> None:
    """What the server did not report is `None`, and a 0 that it did is 0."""
    details = {"prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens_details": {"reasoning_tokens": 3}}
    zeros = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}
    for more in (details, zeros):
        server.script(Answer("hi", usage={"prompt_tokens": 11, "completion_tokens": 7, **more}))
    server.script(Answer("hi"))
    assert ask(model, QUESTION).usage == Usage(11, 7, 5, 3)
    assert ask(model, QUESTION).usage == Usage(11, 7, 0, 0)
    assert ask(model, QUESTION).usage == Usage(11, 7, None, None)


# --- requests


def test_settings_and_output_are_sent(model: AdaptedModel, server: OpenAIServer) -> None:
    """The settings have pydantic-ai's names. The output's schema is sent if the model's profile supports it."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    server.script(Answer('{"name": "Ana"}'), Answer("hi"))
    settings = {"temperature": 0.25, "extra_body": {"top_k": 3}}
    request = ModelRequest((STATEMENT,), settings=settings, output=schema)
    assert model.respond(request, new_call()).content == '{"name": "Ana"}'
    sent = server.requests[0]
    assert (sent["temperature"], sent["top_k"]) == (0.25, 3)
    assert sent["response_format"]["json_schema"]["schema"]["properties"] == schema["properties"]
    with GroqServer() as other:
        groq = adapted("groq", other.base_url.removesuffix("/v1"))
        other.script(Answer("hi"))
        assert groq.respond(request, new_call()).content == "hi"
        assert "response_format" not in other.requests[0]
        groq.close()


def test_a_choice_of_tools_has_the_names_of_the_request(model: AdaptedModel, server: OpenAIServer) -> None:
    """A tool's name may be translated, and so are the names in `tool_choice`."""
    tools = tuple(ToolSchema(name, "", {}) for name in ("a:b", "c"))
    model.respond(ModelRequest((QUESTION,), tools, settings={"tool_choice": ["a:b"]}), new_call())
    assert server.requests[0]["tool_choice"]["function"]["name"] == "a_b"


def test_an_abort_closes_the_connection_at_once() -> None:
    """The provider stops generating, and charging, when the connection closes."""
    listening = socket.create_server(("127.0.0.1", 0))
    closed: list[float] = []
    waits = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n: begun\n\n")
            waits.set()
            while connection.recv(65536):
                pass
            closed.append(time.monotonic())

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    model = adapted("openai-chat", f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
    call = new_call()
    with listening, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, model, QUESTION, call=call)
        assert waits.wait(10)
        time.sleep(0.05)  # until the client has read the headers
        began = time.monotonic()
        call.abort()
        assert isinstance(asked.exception(10), CallAborted)
        server.join(10)
    assert closed[0] - began < 1.0
    logging.getLogger(__name__).info("closed after %.1f ms", 1000 * (closed[0] - began))
    model.close()


def test_a_model_survives_the_end_of_its_loop(server: OpenAIServer) -> None:
    """A client belongs to one event loop. A fork, or a second loop, gets a client of its own."""
    model = adapted("openai-chat", server.base_url)
    ask(model, QUESTION)
    event_loop.close()
    assert ask(model, QUESTION).tool_calls
    model.close()


# --- model objects


class TestObject(ModelSuite):
    """A model object with a client of its own passes the suite of all models."""

    @pytest.fixture
    def model(self, server: OpenAIServer) -> Iterator[Model]:
        provider = OpenAIProvider(base_url=server.base_url, api_key="key")
        made = adapt_model(OpenAIChatModel("test-model", provider=provider), SystemClock())
        yield made
        event_loop.run(lambda _: provider.client.close(), new_call())

    def test_neither_it_nor_its_sdk_retries(self, model: Model, server: OpenAIServer) -> None:
        """Retries are perdure's."""
        server.script(Status(429, headers={"Retry-After": "7"}))
        with pytest.raises(RateLimited) as caught:
            ask(model, QUESTION)
        assert caught.value.retry_after_s == 7
        assert len(server.requests) == 1

    def test_its_name_is_its_id(self, model: Model) -> None:
        assert model.name == "openai:test-model"

    def test_a_stream_without_a_finish_is_no_reply(self, model: Model, server: OpenAIServer) -> None:
        """pydantic-ai takes it for a complete one."""
        server.script(deltas({"content": "half"}, finish=None))
        with pytest.raises(InvalidResponse):
            ask(model, STATEMENT)


def test_function_and_test_models_reply() -> None:
    """They have no server, and no finish reason."""

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> Any:
        if info.function_tools:
            calls: DeltaToolCalls = {0: DeltaToolCall("clock", "{}", tool_call_id="a")}
            yield calls
        else:
            yield "hel"
            yield "lo"

    made = adapt_model(FunctionModel(stream_function=stream), SystemClock())
    assert ask(made, QUESTION, tools=False).content == "hello"
    reply = ask(made, QUESTION)
    assert (reply.tool_calls, reply.stop_reason) == ((ToolCall("a", "clock", "{}"),), "tool_calls")
    fine = adapt_model(TestModel(custom_output_text="fine"), SystemClock())
    assert ask(fine, QUESTION, tools=False).content == "fine"


# --- settings


def make(name: str, endpoint: Endpoint | None = None) -> AdaptedModel:
    return adapted_model(name, SystemClock(), "PERDURE_MODEL", endpoint)


def test_a_missing_sdk_is_named_with_its_extra() -> None:
    with pytest.raises(SettingsError, match=r"PERDURE_MODEL is 'cohere:x'.*'pydantic-ai-slim\[cohere\]'"):
        make("cohere:x")


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that call no model start without the key."""
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MissingKey, match=r"PERDURE_MODEL is 'google:gemini-3-pro'.*GOOGLE_API_KEY"):
        make("google:gemini-3-pro")


def test_resolve_finds_the_providers_of_pydantic_ai(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any name that perdure does not know itself may be a provider of pydantic-ai."""
    monkeypatch.setenv("GROQ_API_KEY", "key")
    model = resolve("groq:llama-3.3-70b", Settings(), SystemClock())
    assert isinstance(model, AdaptedModel)
    assert model.name == "groq:llama-3.3-70b"
    with pytest.raises(SettingsError, match=r"'pydantic-ai-slim\[cohere\]'"):
        resolve("cohere:x", Settings(), SystemClock())
    model.close()


def test_an_unknown_provider_is_refused() -> None:
    with pytest.raises(SettingsError, match="PERDURE_MODEL is 'nobody:x': pydantic-ai knows no provider 'nobody'"):
        make("nobody:x")


def test_a_provider_without_a_url_is_no_endpoint() -> None:
    with pytest.raises(SettingsError, match="accepts no URL"):
        make("deepseek:x", Endpoint("mine", "http://127.0.0.1:1/v1", "key"))


def test_an_endpoint_is_a_provider_of_its_own(server: OpenAIServer) -> None:
    """What one endpoint signed goes to no other, even if both have the same kind."""
    model = adapted_model(
        "vllm-a:qwen",
        SystemClock(),
        "PERDURE_MODEL",
        Endpoint("vllm-a", server.base_url, "key"),
        "openai-chat",
    )
    server.script(deltas({"reasoning_content": "Hm."}, {"content": "Hello."}))
    opaque = ask(model, STATEMENT).opaque
    assert model.name == "vllm-a:qwen"
    assert opaque is not None
    host = server.base_url.removeprefix("http://").partition("/")[0]
    assert (opaque.endpoint, opaque.family) == (f"vllm-a@{host}", "qwen")
    stored: list[Mapping[str, Any]] = json.loads(opaque.parts[PART])
    assert stored[0]["provider_name"] == "vllm-a"
    model.close()


def test_without_the_extra_the_import_names_it() -> None:
    program = "import sys; sys.modules['pydantic_ai'] = None; import perdure.models.adapted"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "SettingsError" in ended.stderr
    assert "pip install 'perdure[pydantic-ai]'" in ended.stderr
