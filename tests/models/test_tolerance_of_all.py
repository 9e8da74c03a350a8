"""What perdure's own models and those of pydantic-ai both accept of servers that speak Chat Completions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import ContentFiltered, ContextTooLong, InvalidResponse, PerdureError, ProviderError
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.endpoints import ANTHROPIC, Refused
from perdure.models.protocol import Attachment, Message, ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import QUESTION, ask, new_call
from tests.models.adapted.test_adapted_suite import BlocksServer
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, Chunks, OpenAIServer, Raw, Status, chunk
from tests.models.responses_server import ResponsesServer
from tests.models.server import Wire

Make = Callable[..., EndpointModel | AdaptedModel]

ONE, TWO = '{"expression": "1"}', '{"expression": "2"}'
EVENTS = [
    chunk([{"index": 0, "delta": {"content": "<think>Hm.</think>Y"}}]),
    chunk([{"index": 0, "delta": {"content": "es."}}]),
    chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}]),
]


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as running:
        yield running


@pytest.fixture(params=["own", "adapted"])
def make(request: pytest.FixtureRequest, server: OpenAIServer) -> Iterator[Make]:
    """Makes a model of the server as an endpoint with these members. All share what they learn of it."""
    made: list[EndpointModel | AdaptedModel] = []
    refused: Refused = {}

    def model(model: str = "test-model", **members: Any) -> EndpointModel | AdaptedModel:
        endpoint = Endpoint("there", server.base_url, "sk-of-the-tests", **members)
        if request.param == "own":
            made.append(EndpointModel(endpoint, model, SystemClock(), refused))
        else:
            name = f"there:{model}"
            made.append(adapted_model(name, SystemClock(), "PERDURE_MODEL", endpoint, "openai-chat", refused=refused))
        return made[-1]

    yield model
    for each in made:
        each.close()


Messages = tuple[BlocksServer, EndpointModel | AdaptedModel]
MESSAGE_START: Wire = {
    "type": "message_start",
    "message": {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "usage": {"input_tokens": 11, "output_tokens": 1},
    },
}


@pytest.fixture(params=["own", "adapted"])
def messages(request: pytest.FixtureRequest) -> Iterator[Messages]:
    """A server of Anthropic's protocol, and a model of it."""
    with BlocksServer() as running:
        endpoint = Endpoint("there", running.base_url, kind=ANTHROPIC)
        model = (
            EndpointModel(endpoint, "m", SystemClock())
            if request.param == "own"
            else adapted_model("there:m", SystemClock(), "PERDURE_MODEL", endpoint, ANTHROPIC)
        )
        yield running, model
        model.close()


def streamed(model: EndpointModel | AdaptedModel) -> tuple[str, ModelReply]:
    """The text that a model reports, and its reply."""
    texts = list[str]()
    reply = ask(model, QUESTION, call=ModelCall(SystemClock(), 30.0, texts.append))
    return "".join(texts), reply


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        pytest.param("<thought>Hm.</thought>Yes.", "Hm.", "Yes.", id="another name"),
        pytest.param("<THINK>Hm.</Think>Yes.", "Hm.", "Yes.", id="capitals"),
        pytest.param("<think>a<think>b</think>c</think>Yes.", "abc", "Yes.", id="nested"),
        pytest.param("<think>\n<think>Hm.</think>Yes.", "Hm.", "Yes.", id="opened twice"),
        pytest.param("<think>Not <think> again.</think>\nYes.", "Not  again.", "Yes.", id="a tag within thoughts"),
        pytest.param("<think>Hm.</think>\n</think>Yes.", "Hm.", "Yes.", id="closed twice"),
        pytest.param("Sure.\n\n<think>Hm.</think>\n\nYes.", "Hm.", "Sure.\n\nYes.", id="after text"),
        pytest.param(
            "Write\n<think>, then go on.", "", "Write\n<think>, then go on.", id="a tag at a line's beginning"
        ),
        pytest.param("```\n<think>Hm.</think>\n```", "", "```\n<think>Hm.</think>\n```", id="code"),
    ],
)
def test_thoughts_in_tags_are_no_text(  # noqa: PLR0917 (two fixtures and a table)
    make: Make, server: OpenAIServer, size: int, text: str, thoughts: str, content: str
) -> None:
    """Tags may be in capitals, nested, and after text. What no tag closes is text if the reply ended properly."""
    server.script(Answer(text, piece=size))
    shown, reply = streamed(make())
    assert (shown, reply.content, reply.thoughts) == (content, content, thoughts)


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [("Hm.</think>\nYes.", "Hm.", "Yes."), ("Just yes.", "", "Just yes."), ("</think>Yes.", "", "Yes.")],
)
def test_a_server_may_omit_the_opening_tag(  # noqa: PLR0917 (two fixtures and a table)
    make: Make, server: OpenAIServer, size: int, text: str, thoughts: str, content: str
) -> None:
    """A model that answers without thoughts writes no closing tag: its text is the answer."""
    server.script(Answer(text, piece=size))
    shown, reply = streamed(make(thinks=True))
    assert (shown, reply.content, reply.thoughts) == (content, content, thoughts)


PICTURE = Message(Role.USER, "Look: [image]", files=(Attachment("image/png", "cat.png", 6, 13, b"a picture"),))


def test_images_that_a_server_does_not_support_are_not_sent_again(make: Make, server: OpenAIServer) -> None:
    """The same prompt is sent without them at once, and so are later prompts."""
    server.script(Status(400, message="image input is not supported"), Answer("Yes."), Answer("Again."))
    model = make(reads=("images",))
    for content in ("Yes.", "Again."):
        assert ask(model, PICTURE).content == content
    contents = [each["messages"][-1]["content"] for each in server.requests]
    assert [type(content) for content in contents] == [list, str, str]


def test_one_image_that_a_server_refuses_is_described(make: Make, server: OpenAIServer) -> None:
    """Other images are sent: the refusal is about this one."""
    server.script(Status(400, message="the image exceeds 5 MB"), Answer("Yes."), Answer("Again."))
    model = make(reads=("images",))
    for content in ("Yes.", "Again."):
        assert ask(model, PICTURE).content == content
    contents = [each["messages"][-1]["content"] for each in server.requests]
    assert [type(content) for content in contents] == [list, str, list]


def test_a_filtered_prompt_with_an_image_is_not_sent_again(make: Make, server: OpenAIServer) -> None:
    """The provider refused the words, not the form."""
    server.script(Status(400, message="The prompt triggered the content management policy", code="content_filter"))
    with pytest.raises(ContentFiltered):
        ask(make(reads=("images",)), PICTURE)
    assert len(server.requests) == 1


def test_thoughts_that_were_cut_off_are_no_answer(make: Make, server: OpenAIServer) -> None:
    server.script(Answer("Hm, and so", finish_reason="length"), Answer("Sure.\n<think>Hm", finish_reason="length"))
    with pytest.raises(PerdureError):
        ask(make(thinks=True), QUESTION)
    assert ask(make(), QUESTION).content == "Sure.\n"


@pytest.mark.parametrize(
    "content_type",
    ["text/event-stream", "application/json", "Application/JSON", "application/x-ndjson", "text/plain", ""],
)
@pytest.mark.parametrize("form", ["whole", "indented", "lines"])
def test_json_without_events_is_a_reply(make: Make, server: OpenAIServer, content_type: str, form: str) -> None:
    """Some servers send a whole reply, or JSON in lines of its own, under any content type or none."""
    whole = server.whole(Answer("<think>Hm.</think>Yes."), "m")
    body = "\n".join(map(json.dumps, EVENTS)) if form == "lines" else json.dumps(whole, indent=2 * (form != "whole"))
    server.script(Raw(b"\n" + body.encode(), content_type))
    shown, reply = streamed(make())
    assert (shown, reply.content, reply.thoughts) == ("Yes.", "Yes.", "Hm.")


def test_an_empty_stream_is_requested_again_as_a_whole(make: Make, server: OpenAIServer) -> None:
    """A server that fails behind the head of its response reports the failure only without a stream."""
    too_long = Status(400, "context_length_exceeded", "This model's maximum context length is 2048 tokens.")
    server.script(Raw(b""), too_long, Raw(b""), Answer("Yes."), Raw(b""), Raw(b""))
    model = make()
    with pytest.raises(ContextTooLong):
        ask(model, QUESTION)
    assert ask(model, QUESTION).content == "Yes."
    with pytest.raises(InvalidResponse):
        ask(model, QUESTION)
    assert [bool(each.get("stream")) for each in server.requests] == [True, False] * 3
    assert "stream_options" not in server.requests[1]


UNVERIFIED = Status(400, "unsupported_value", "Your organization must be verified to stream this model. Please go to:")


def test_a_refused_stream_is_not_requested_again(
    make: Make, server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenAI streams some models only to organizations that it has verified. The other models are streamed."""
    server.script(UNVERIFIED, *[Answer("Yes.")] * 3)
    model, other = make(), make("other")
    assert [streamed(each)[0] for each in (model, model, other)] == ["Yes."] * 3
    sent = [(each["model"], each["stream"], "stream_options" in each) for each in server.requests]
    whole = ("test-model", False, False)
    assert sent == [("test-model", True, True), whole, whole, ("other", True, True)]
    assert "there:test-model refused a stream, and is asked again without" in caplog.text


def test_a_stream_may_be_refused_by_its_parameter(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the option, and the message may have other words."""
    error = {"error": {"message": "No.", "type": "invalid_request_error", "param": "stream", "code": None}}
    monkeypatch.setattr(server, "error", lambda _: error)
    server.script(Status(400), Answer("Yes."))
    assert ask(model_of(server), QUESTION).content == "Yes."
    assert [each["stream"] for each in server.requests] == [True, False]


def test_a_whole_reply_that_is_refused_is_not_requested_again(make: Make, server: OpenAIServer) -> None:
    """Nothing is left to ask otherwise."""
    server.script(UNVERIFIED, UNVERIFIED)
    with pytest.raises(ProviderError):
        ask(make(), QUESTION)
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [400, 404, 422, 500, 501])
def test_a_refused_option_is_left_out(make: Make, server: OpenAIServer, status: int) -> None:
    """Both servers of llama.cpp refuse an option with status 500. It is left out from then on."""
    server.script(Status(status, message="Unsupported param: stream_options"), Answer("yes"), Answer("yes"))
    model = make()
    assert [ask(model, QUESTION).content for _ in range(2)] == ["yes", "yes"]
    assert ["stream_options" in each for each in server.requests] == [True, False, False]


def test_what_a_server_refuses_is_left_out_for_its_other_models(
    make: Make, server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The model decides whether it takes a temperature, but not which options of the protocol its server has."""
    said = ["Unsupported param: stream_options", "temperature is not supported by this model"]
    server.script(*[Status(400, message=each) for each in said], *[Answer("yes")] * 2)
    request = ModelRequest((QUESTION,), settings={"temperature": 0.5})
    for name in ("first", "second"):
        assert make(name).respond(request, new_call()).content == "yes"
    sent = [(each["model"], "stream_options" in each, "temperature" in each) for each in server.requests]
    assert sent[2:] == [("first", False, False), ("second", False, True)]
    for option in ("stream_options", "temperature"):
        assert f"there:first refused {option}, and is asked again without" in caplog.text


def test_what_does_not_help_is_not_left_out_later(make: Make, server: OpenAIServer) -> None:
    """The server meant something else, and a later request keeps the option."""
    server.script(*[Status(400, message="stream_options: no")] * 2, Answer("yes"))
    model = make()
    with pytest.raises(ProviderError):
        ask(model, QUESTION)
    assert ask(model, QUESTION).content == "yes"
    assert ["stream_options" in each for each in server.requests] == [True, False, True]


@pytest.mark.parametrize("is_own", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["own", "adapted"])
def test_an_option_of_messages_may_be_refused(*, is_own: bool) -> None:
    """Servers of Anthropic's protocol refuse options, too; what a model refuses concerns that model only."""
    with BlocksServer() as server:
        endpoint = Endpoint("there", server.base_url, kind=ANTHROPIC)
        server.script(Status(400, message="top_k: Extra inputs are not permitted"), *[Answer("yes")] * 3)
        request = ModelRequest((QUESTION,), settings={"top_k": 3, "temperature": 0.5})
        refused: Refused = {}
        for name, times in (("first", 2), ("second", 1)):
            model: Any = (
                EndpointModel(endpoint, name, SystemClock(), refused)
                if is_own
                else adapted_model(
                    f"there:{name}", SystemClock(), "PERDURE_MODEL", endpoint, ANTHROPIC, refused=refused
                )
            )
            for _ in range(times):
                assert model.respond(request, new_call()).content == "yes"
            model.close()
    assert ["top_k" in each for each in server.requests] == [True, False, False, True]
    assert all(each["temperature"] == 0.5 for each in server.requests)


def test_a_limit_may_have_its_other_name(make: Make, server: OpenAIServer) -> None:
    """Of the two names of the limit of tokens, each server has one."""
    names = ["max_tokens", "max_completion_tokens"]
    model = make()
    request = ModelRequest((QUESTION,), settings={"max_tokens": 9})
    server.script(Answer("yes"))
    model.respond(request, new_call())
    (sent,) = [name for name in names if name in server.requests[0]]
    (other,) = [name for name in names if name != sent]
    server.script(Status(400, message=f"Unsupported parameter: {sent}. Use {other} instead."), Answer("yes"))
    model.respond(request, new_call())
    assert server.requests[2][other] == 9
    assert sent not in server.requests[2]


def test_calls_of_two_tools_without_arguments_are_two(make: Make, server: OpenAIServer) -> None:
    """A call without arguments is followed by a call of another tool with the same index and without an id."""
    given = [("clock", ""), ("calculator", ONE), ("calculator", TWO)]
    fragments = [{"index": 0, "function": {"name": name, "arguments": arguments}} for name, arguments in given]
    events = [chunk([{"index": 0, "delta": {"tool_calls": [each]}}]) for each in fragments]
    server.script(Chunks([*events, chunk([{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])]))
    calls = ask(make(), QUESTION).tool_calls
    assert [(call.name, call.arguments) for call in calls] == given
    assert len({call.id for call in calls}) == len(given)


PIECES = [
    pytest.param(["{}", TWO], TWO, id="an object"),
    pytest.param(["{}", TWO[:5], TWO[5:]], TWO, id="an object, in pieces"),
    pytest.param(["null", TWO], TWO, id="null"),
    pytest.param(['""', TWO], TWO, id="an empty text"),
    pytest.param(["{}", json.dumps(TWO)], TWO, id="an object, encoded twice"),
    pytest.param(["{}", "{}"], "{}", id="no arguments"),
    pytest.param(["{}", TWO, TWO], f"{{}}{TWO}{TWO}", id="two objects"),
    pytest.param(["{}", "[2]"], "{}[2]", id="no object"),
]


@pytest.mark.parametrize(("pieces", "arguments"), PIECES)
def test_empty_arguments_may_come_before_the_arguments(
    make: Make, server: OpenAIServer, pieces: list[str], arguments: str
) -> None:
    """Gateways before Bedrock begin a call with what its first event has. Anything else is left to the tool."""
    fragments: list[dict[str, Any]] = [{"index": 0, "function": {"arguments": each}} for each in pieces]
    fragments[0] |= {"id": "a", "type": "function"}
    fragments[0]["function"]["name"] = "calculator"
    events = [chunk([{"index": 0, "delta": {"tool_calls": [each]}}]) for each in fragments]
    server.script(Chunks([*events, chunk([{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])]))
    assert ask(make(), QUESTION).tool_calls == (ToolCall("a", "calculator", arguments),)


@pytest.mark.parametrize(("pieces", "arguments"), PIECES)
def test_empty_arguments_may_come_before_those_of_messages(
    messages: Messages, pieces: list[str], arguments: str
) -> None:
    """The provider begins each call with the input `{}`, which is no piece of it. Some servers repeat it as one."""
    server, model = messages
    called = {"type": "tool_use", "id": "a", "name": "calculator", "input": {}}
    server.script(
        Chunks(
            [
                MESSAGE_START,
                {"type": "content_block_start", "index": 0, "content_block": called},
                *(
                    {
                        "type": "content_block_delta",
                        "index": 0,
                        "delta": {"type": "input_json_delta", "partial_json": each},
                    }
                    for each in pieces
                ),
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
            ]
        )
    )
    assert ask(model, QUESTION).tool_calls == (ToolCall("a", "calculator", arguments),)


def test_empty_arguments_may_come_before_those_of_responses() -> None:
    with ResponsesServer() as server:
        endpoint = Endpoint("there", server.base_url, "key")
        model = adapted_model("there:m", SystemClock(), "PERDURE_MODEL", endpoint, "openai-responses")
        server.script(Answer(calls=[Call("calculator", "{}" + TWO, "a")], piece=2))
        assert [call.arguments for call in ask(model, QUESTION).tool_calls] == [TWO]
        model.close()


@pytest.mark.parametrize(
    ("begun", "ended", "usage"),
    [
        pytest.param({"input_tokens": 1500}, {"input_tokens": 0}, (1500, None), id="zeros at the end"),
        pytest.param(
            {"input_tokens": 3, "cache_read_input_tokens": 1500},
            {"input_tokens": 0, "cache_read_input_tokens": 0},
            (1503, 1500),
            id="zeros of the cache",
        ),
        pytest.param({"input_tokens": 0}, {"input_tokens": 1500}, (1500, None), id="zeros at the beginning"),
        pytest.param(
            {"input_tokens": 1500},
            {"input_tokens": 100, "cache_read_input_tokens": 1400},
            (1500, 1400),
            id="divided at the end",
        ),
    ],
)
def test_counts_of_messages_do_not_shrink(
    messages: Messages, begun: Wire, ended: Wire, usage: tuple[int, int | None]
) -> None:
    """The counts of a reply are cumulative, but some servers end it with zeros."""
    server, model = messages
    start = {**MESSAGE_START["message"], "usage": {**begun, "output_tokens": 1}}
    server.script(
        Chunks(
            [
                {"type": "message_start", "message": start},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Yes."}},
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {**ended, "output_tokens": 7}},
            ]
        )
    )
    found = ask(model, QUESTION).usage
    assert found is not None
    assert (found.input_tokens, found.output_tokens, found.cached_tokens or None) == (usage[0], 7, usage[1])


def test_counts_may_be_strings(server: OpenAIServer) -> None:
    """Some servers send counts as strings or floats. The SDKs of adapted models read numbers only."""
    usage = {"prompt_tokens": "11", "completion_tokens": 7.0, "prompt_tokens_details": {"cached_tokens": "x"}}
    server.script(Answer("yes", usage=usage))
    model = EndpointModel(Endpoint("there", server.base_url), "test-model", SystemClock())
    assert ask(model, QUESTION).usage == Usage(11, 7)


@pytest.mark.parametrize(("setting", "shows"), [(True, True), (None, False), (False, False)])
def test_what_a_server_sent_is_logged_if_the_setting_allows_it(  # noqa: PLR0917 (three fixtures and a table)
    make: Make,
    server: OpenAIServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    setting: bool | None,
    shows: bool,
) -> None:
    """By default, only answers of servers on loopback are quoted: a server may quote what users wrote."""
    monkeypatch.setattr("perdure.models.providers.endpoint.ipaddress.ip_address", _no_address)
    model = make(show_received=setting)
    server.script(Raw(b"<html>It works!" + b"x" * 300, "text/html"), Status(400, "odd", "You said: my secret"))
    with caplog.at_level(logging.WARNING, "perdure"):
        for error in (InvalidResponse, ProviderError):
            with pytest.raises(error):
                ask(model, QUESTION)
    assert ("the server sent: <html>It works!xx" in caplog.text) is shows
    assert ("You said: my secret" in caplog.text) is shows
    assert "x" * 200 not in caplog.text


def _no_address(_: str) -> None:
    raise ValueError("not an address")
