"""More servers that speak in their own way, as reports in public trackers describe them.

The reports, by test:

    an event without a chunk        NousResearch/hermes-agent#80822, earendil-works/pi#2468, pydantic/pydantic-ai#5165,
                                    RooCodeInc/Roo-Code#9105, bagofwords1/bagofwords#742
    fragments of calls              openai-php/client#623, open-webui/open-webui#27195, anomalyco/opencode#43328
    a call that was cut off         vllm-project/vllm#53269, vllm-project/vllm#47963
    ids that repeat                 HKUDS/nanobot#4473, HKUDS/nanobot#3943, QwenLM/qwen-code#8382, can1357/oh-my-pi#2055
    blank texts                     anomalyco/opencode#17395, NousResearch/hermes-agent#9486, #55092,
                                    requestyai/ai-sdk-requesty#1
    a pause in the body             AtomicBot-ai/atomic-agent#106, Aider-AI/aider#3694, dcdpr/jp#1061,
                                    Tracer-Cloud/opensre#3171, dirge-code/dirge#719, everruns/everruns#2280
    a malformed call                pydantic/pydantic-ai#631, google-gemini/gemini-cli#12674, mastra-ai/mastra#20302
    other tags of thoughts          RooCodeInc/Roo-Code#8522, open-webui/open-webui#16856, Vali-98/ChatterUI#510
    arguments encoded twice         huggingface/smolagents#1003, tailcallhq/forgecode#2764, openclaw/openclaw#40425
    references in schemas           CommandCodeAI/command-code#566, anomalyco/opencode#39995, memodb-io/Acontext#107
    thoughts without a signature    sgl-project/sglang#39752, anthropics/anthropic-sdk-csharp#181,
                                    NousResearch/hermes-agent#17992
    MiniMax's errors                RooCodeInc/Roo-Code#9105, adrianlyjak/obsidian-aloud-tts#114
    names of tools                  ollama/ollama#12132, vllm-project/vllm#32587, tontinton/maki#518
    an error as an end              damianvtran/local-operator#223, diegosouzapw/OmniRoute#8210,
                                    OleksandrChekhovskyi/hax#15
    a refusal, as it is named       deepseek-ai/DeepSeek-V2#30, UKGovernmentBEIS/inspect_ai#2267,
                                    MoonshotAI/kimi-code#207, NousResearch/hermes-agent#1877, #41110,
                                    thu-coai/Glyph#9, vllm-project/vllm#36789, anomalyco/opencode#45834
    an error within another one     diegosouzapw/OmniRoute#3044, BeehiveInnovations/pal-mcp-server#134
    a call that Groq cannot read    pydantic/pydantic-ai#2774, #4354, pipecat-ai/pipecat#1168,
                                    huggingface/smolagents#1119
    the order of roles              zed-industries/zed#37021, mistralai/mistral-vibe#578,
                                    NousResearch/hermes-agent#20154, vllm-project/vllm#6862, google/adk-python#1373
    thoughts that are refused       janhq/jan#8136, NousResearch/hermes-agent#11089
    signatures that are refused     google-gemini/gemini-cli#13467, charmbracelet/crush#1698, decolua/9router#301,
                                    CommonstackAI/UncommonRoute#19
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import (
    ContentFiltered,
    ContextTooLong,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
    ToolError,
)
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.endpoints import ANTHROPIC
from perdure.models.protocol import Message, ModelRequest, Role, ToolCall, ToolSchema
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import QUESTION, ask, new_call, turn
from tests.models.adapted.test_adapted_suite import BlocksServer
from tests.models.anthropic_server import events_of
from tests.models.openai_server import Answer, Call, Chunks, OpenAIServer, Raw, Status, Step, chunk
from tests.models.server import ProviderServer, Wire

Made = EndpointModel | AdaptedModel
Make = Callable[..., Made]

ONE, TWO = '{"expression": "1"}', '{"expression": "2"}'
STOP = chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
CALLS = chunk([{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])


def delta(**members: Any) -> dict[str, Any]:
    return chunk([{"index": 0, "delta": members, "finish_reason": None}])


def fragment(**members: Any) -> dict[str, Any]:
    """A delta with one fragment of a call."""
    return delta(tool_calls=[{"index": 0, **members}])


def made_of(server: ProviderServer, kind: str, protocol: str = "openai-chat", model: str = "test-model") -> Made:
    """A model of the server: perdure's own, or one of pydantic-ai."""
    own = ANTHROPIC if protocol == ANTHROPIC else "openai"
    endpoint = Endpoint("there", server.base_url, "sk-of-the-tests", kind=own)
    if kind == "own":
        return EndpointModel(endpoint, model, SystemClock())
    return adapted_model(f"there:{model}", SystemClock(), "PERDURE_MODEL", endpoint, protocol)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as running:
        yield running


@pytest.fixture(params=["own", "adapted"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(server: OpenAIServer, kind: str) -> Iterator[Made]:
    made = made_of(server, kind)
    yield made
    made.close()


@pytest.fixture
def messages(kind: str) -> Iterator[tuple[BlocksServer, Made]]:
    """A server of Anthropic's protocol, and a model of it."""
    with BlocksServer() as running:
        made = made_of(running, kind, ANTHROPIC)
        yield running, made
        made.close()


# --- the stream


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b"null", id="null"),
        pytest.param({"choices": None}, id="choices of null"),
        pytest.param({"usage": None}, id="no choices"),
        pytest.param({"choices": [{"index": 0, "delta": None, "finish_reason": None}]}, id="a delta of null"),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_an_event_without_a_chunk_is_skipped(model: Made, server: OpenAIServer, odd: Any, at: int) -> None:
    """Gateways keep a connection open with such events, and annotate replies with them."""
    events: list[Any] = [delta(content="Yes"), delta(content=".")]
    events.insert(at, odd if isinstance(odd, bytes) else {**chunk([]), **odd})
    server.script(Chunks([*events, STOP]))
    assert ask(model, QUESTION).content == "Yes."


@pytest.mark.parametrize(
    "body",
    [
        {
            "error": {"message": "overloaded", "code": 502},
            **chunk([{"index": 0, "delta": {}, "finish_reason": "error"}]),
        },
        {"error": {"message": "overloaded", "code": "server_error"}, **chunk([])},
        chunk([{"index": 0, "delta": {"content": ""}, "finish_reason": "error", "native_finish_reason": "error"}]),
    ],
    ids=["an end", "no choices", "only an end"],
)
def test_an_error_as_an_end_is_no_reply(model: Made, server: OpenAIServer, body: Wire) -> None:
    """A gateway has sent the head of its response when its own provider fails."""
    server.script(Chunks([delta(role="assistant", content=""), body]))
    with pytest.raises(ProviderError) as caught:
        ask(model, QUESTION)
    assert caught.value.transient


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("choices", [{"choices": None}, {}], ids=["choices of null", "no choices"])
def test_an_error_of_minimax_under_status_200_is_an_error(
    model: Made, server: OpenAIServer, caplog: pytest.LogCaptureFixture, choices: Wire, *, is_streamed: bool
) -> None:
    """The vendor's own object says what is wrong. With the code 0, it says that nothing is."""
    body = {"id": "1", **choices, "base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}}
    fine = {"base_resp": {"status_code": 0, "status_msg": ""}}
    server.script(Chunks([body]) if is_streamed else Raw(json.dumps(body).encode(), "application/json"))
    server.script(Chunks([{**delta(content="Yes."), **fine}, {**STOP, **fine}]))
    with pytest.raises(ProviderError):
        ask(model, QUESTION)
    assert "code 1008" in caplog.text
    assert "insufficient balance" in caplog.text
    assert ask(model, QUESTION).content == "Yes."


# --- calls


@pytest.mark.parametrize(
    "fragments",
    [
        pytest.param(
            [
                fragment(id="a", type="function", function={"name": "calculator"}),
                fragment(function={"arguments": TWO}),
            ],
            id="no arguments at first",
        ),
        pytest.param(
            [
                fragment(id="a", type="function", function={"name": "calculator", "arguments": None}),
                fragment(function={"arguments": TWO}),
            ],
            id="arguments of null",
        ),
        pytest.param(
            [
                fragment(id="a", type="function", function={"name": "calculator", "arguments": TWO[:5]}),
                fragment(id=None, type=None, function={"name": None, "arguments": TWO[5:]}),
            ],
            id="null in place of what came before",
        ),
        pytest.param(
            [
                fragment(id="a", type="function", function={"name": "calculator", "arguments": TWO[:5]}),
                fragment(id="", type="function", function={"name": "", "arguments": TWO[5:]}),
            ],
            id="empty texts in place of what came before",
        ),
    ],
)
def test_fragments_of_calls_may_lack_members(model: Made, server: OpenAIServer, fragments: list[Wire]) -> None:
    """The first fragment may have no arguments, and the others neither an id nor a name."""
    server.script(Chunks([*fragments, CALLS]))
    assert ask(model, QUESTION).tool_calls == (ToolCall("a", "calculator", TWO),)


def test_a_call_without_any_arguments_has_none(model: Made, server: OpenAIServer) -> None:
    """A call of a tool without parameters may have no such member at all, and comes back with an empty object."""
    server.script(Chunks([fragment(id="a", type="function", function={"name": "clock"}), CALLS]), Answer("noon"))
    reply = ask(model, QUESTION)
    assert reply.tool_calls == (ToolCall("a", "clock", ""),)
    ask(model, QUESTION, Message(Role.ASSISTANT, "", reply.tool_calls), Message(Role.TOOL, "12", tool_call_id="a"))
    [call] = server.requests[1]["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"}


@pytest.mark.parametrize("arguments", ['{"expression": "12', '{"expression"', "{"])
def test_a_call_that_was_cut_off_does_not_run(model: Made, server: OpenAIServer, arguments: str) -> None:
    """A server says that the calls are complete, although the limit of tokens has cut their arguments off."""
    server.script(Answer(calls=[Call("calculator", arguments)], finish_reason="tool_calls"))
    with pytest.raises(ToolError, match="not valid JSON"):
        turn(model, QUESTION)


@pytest.mark.parametrize("times", [1, 2])
def test_arguments_may_be_encoded_twice(model: Made, server: OpenAIServer, times: int) -> None:
    """The arguments are a text with JSON, whose value is a text with the JSON that was meant."""
    encoded = TWO
    for _ in range(times):
        encoded = json.dumps(encoded)
    server.script(Answer(calls=[Call("calculator", encoded)]))
    assert turn(model, QUESTION)[2].content == "2"
    sent = server.requests[1]["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == json.loads(TWO)


@pytest.mark.parametrize(
    "name", ["calculator<|channel|>commentary", "calculator<|channel|>analysis", "functions.calculator", " calculator"]
)
def test_names_of_tools_may_have_parts_of_a_template(model: Made, server: OpenAIServer, name: str) -> None:
    """Servers leave tokens of the model's own format in a name, and models add the namespace of their training."""
    server.script(Answer(calls=[Call(name, TWO)]))
    reply = ask(model, QUESTION)
    assert reply.tool_calls[0].name == "calculator"


def test_a_name_of_no_tool_stays(model: Made, server: OpenAIServer) -> None:
    """The model is told that there is no such tool. Nothing is guessed."""
    server.script(Answer(calls=[Call("functions.unknown", TWO)]))
    assert ask(model, QUESTION).tool_calls[0].name == "functions.unknown"


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_ids_that_repeat_are_told_apart(kind: str, protocol: str) -> None:
    """Servers give parallel calls one id, also in the next round, and refuse a conversation in which it repeats."""
    same = [Call("calculator", ONE, "grep_3"), Call("calculator", TWO, "grep_3")]
    with OpenAIServer() if protocol == "chat" else BlocksServer() as server:
        model = made_of(server, kind, "openai-chat" if protocol == "chat" else ANTHROPIC)
        server.script(Answer(calls=same), Answer(calls=same), Answer("done"))
        said = [QUESTION]
        for _ in range(2):
            reply = ask(model, *said)
            said.append(Message(Role.ASSISTANT, reply.content, reply.tool_calls, opaque=reply.opaque))
            assert len({call.id for call in reply.tool_calls}) == 2
            said += [Message(Role.TOOL, call.arguments, tool_call_id=call.id) for call in reply.tool_calls]
        assert ask(model, *said).content == "done"
        model.close()


@pytest.mark.parametrize("reason", ["MALFORMED_FUNCTION_CALL", "function_call_filter: MALFORMED_FUNCTION_CALL"])
def test_a_reply_that_ends_with_a_malformed_call_is_asked_for_again(
    model: Made, server: OpenAIServer, reason: str
) -> None:
    """The model happens to write a call that is none. It is not the prompt's fault, and the next reply may be fine."""
    server.script(Chunks([chunk([{"index": 0, "delta": {"role": "assistant"}, "finish_reason": reason}])]))
    with pytest.raises(InvalidResponse) as caught:
        ask(model, QUESTION)
    assert caught.value.transient


# --- thoughts


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷")],
    ids=["Magistral", "Seed", "Kimi"],
)
@pytest.mark.parametrize("before", ["", "Sure.\n\n"])
def test_models_have_tags_of_their_own(  # noqa: PLR0917 (two fixtures and a table)
    model: Made, server: OpenAIServer, size: int, opening: str, closing: str, before: str
) -> None:
    """They stand where others have `<think>`. In text, they are text."""
    server.script(Answer(f"{before}{opening}Hm [1].{closing}\nYes [2].", piece=size))
    reply = ask(model, QUESTION)
    assert (reply.content, reply.thoughts) == (f"{before}Yes [2].", "Hm [1].")
    server.script(Answer(f"The tag {opening} is one.", piece=size))
    assert ask(model, QUESTION).content == f"The tag {opening} is one."


def streamed(*blocks: Wire) -> Chunks:
    """A stream of these blocks of Anthropic's protocol, in which a signature comes last, if there is one."""
    message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
    usage = {"input_tokens": 1, "output_tokens": 1}
    events: list[Any] = [{"type": "message_start", "message": {**message, "usage": usage}}]
    for index, block in enumerate(blocks):
        opened, deltas = dict(block), list[Wire]()
        if block["type"] == "thinking":
            opened = {"type": "thinking", "thinking": ""}
            deltas.append({"type": "thinking_delta", "thinking": block["thinking"]})
            if "signature" in block:
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            opened["input"] = {}
            deltas.append({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
        events.append({"type": "content_block_start", "index": index, "content_block": opened})
        events += [{"type": "content_block_delta", "index": index, "delta": each} for each in deltas]
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": usage})
    return Chunks(events)


@pytest.mark.parametrize("signature", [{}, {"signature": "c2ln"}], ids=["none", "late"])
def test_thoughts_without_a_signature_come_back(
    messages: tuple[BlocksServer, Made], monkeypatch: pytest.MonkeyPatch, signature: Wire, kind: str
) -> None:
    """Servers of open models sign nothing, or sign at the end. They want what they have sent."""
    server, model = messages
    monkeypatch.setattr(type(server), "judge", lambda *_: None)
    thinking = {"type": "thinking", "thinking": "Hm.", **signature}
    call = {"type": "tool_use", "id": "a", "name": "calculator", "input": {"expression": "2"}}
    server.script(streamed(thinking, call), Answer("Yes."))
    assert turn(model, QUESTION)[-1].content == "Yes."
    first, *_ = server.requests[1]["messages"][1]["content"]
    if kind == "own":
        assert first == thinking
    elif signature:
        assert (first["thinking"], first["signature"]) == ("Hm.", "c2ln")
    else:  # pydantic-ai sends unsigned thoughts as text
        assert "Hm." in first["text"]


# --- what is sent

REFERENCES: Wire = {
    "$defs": {
        "Place": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]},
        "City": {"type": "string", "description": "A city."},
    },
    "properties": {
        "from": {"$ref": "#/$defs/Place", "description": "The origin."},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "again": {"type": "array", "items": {"$ref": "#/properties/stops"}},
    },
    "required": ["from"],
}


def test_references_in_schemas_are_written_out(model: Made, server: OpenAIServer, kind: str) -> None:
    """Servers refuse references, or do not find what they refer to."""
    model.respond(ModelRequest((QUESTION,), (ToolSchema("travel", "", REFERENCES),)), new_call())
    sent = server.requests[0]["tools"][0]["function"]["parameters"]
    city = {"type": "string", "description": "A city."}
    place = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    stops = {"type": "array", "items": place}
    if kind == "adapted":  # pydantic-ai forbids other members
        sent = json.loads(json.dumps(sent).replace(', "additionalProperties": false', ""))
    assert sent["properties"] == {
        "from": {**place, "description": "The origin."},
        "stops": stops,
        "again": {"type": "array", "items": stops},
    }
    assert "$ref" not in json.dumps(sent)


BLANK = "messages: text content blocks must be non-empty"


@pytest.mark.parametrize(
    "said",
    [
        BLANK,
        f"ValidationException: {BLANK}",
        "The text field in the ContentBlock object at messages.2.content.0 is blank.",
        "messages.2: content must not be empty",
    ],
)
def test_blank_texts_that_a_server_refuses_are_not_sent_again(model: Made, server: OpenAIServer, said: str) -> None:
    """A gateway makes blocks of texts, of which its provider accepts none that is empty."""
    called = Message(Role.ASSISTANT, "", (ToolCall("a", "calculator", TWO),))
    conversation = (QUESTION, called, Message(Role.TOOL, "", tool_call_id="a"))
    server.script(Status(400, message=said), Answer("Yes."), Answer("Yes."))
    for _ in range(2):
        assert ask(model, *conversation).content == "Yes."
    first, *others = [[each["content"] for each in body["messages"][2:]] for body in server.requests]
    assert first[0] == ""  # an empty result of a tool is no blank text in the requests of pydantic-ai's models
    assert others == [[None, "(nothing)"], [None, "(nothing)"]]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda body: Raw(json.dumps(body).encode(), "application/json", status=429), id="an object"),
        pytest.param(lambda body: Raw(json.dumps([body]).encode(), "application/json", status=429), id="an array"),
        pytest.param(lambda body: Chunks([body]), id="within a stream"),
    ],
)
def test_the_pause_may_be_in_the_body(model: Made, server: OpenAIServer, step: Callable[[Wire], Step]) -> None:
    """Gemini's servers send no `Retry-After`, but a duration among the error's details."""
    details = [
        {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [{"quotaId": "PerMinute"}]},
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "45.5s"},
    ]
    body = {"error": {"code": 429, "message": "Quota exceeded.", "status": "RESOURCE_EXHAUSTED", "details": details}}
    server.script(step(body))
    with pytest.raises(RateLimited) as caught:
        ask(model, QUESTION)
    assert caught.value.retry_after_s == 45.5


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [
        ({"message": "Rate limit reached (TPM): Limit 30000, Used 29000. Please try again in 2.5s. Visit us."}, 2.5),
        ({"message": "Please try again in 94ms."}, 0.094),
        ({"message": "Please try again in 1m26.4s."}, 86.4),
        ({"message": "Please retry after 26 seconds."}, 26),
        ({"message": "No deployments available, try again in 5 seconds."}, 5),
        ({"message": "Please retry in 44.31s."}, 44.31),
        ({"message": "Slow down.", "retry_after": 7.5}, 7.5),
        ({"message": "Provider returned error", "metadata": {"retry_after_seconds": 8}}, 8),
        ({"message": "Provider returned error", "metadata": {"headers": {"Retry-After": "3"}}}, 3),
        ({"message": "Please try again later."}, None),
        ({"message": "Please try again in 30 days."}, None),
        ({"message": "Slow down.", "metadata": {"headers": {"X-RateLimit-Reset": "9" * 5_000}}}, None),
    ],
)
def test_the_pause_may_be_in_the_error(model: Made, server: OpenAIServer, error: Wire, pause_s: float | None) -> None:
    """Servers and routers say it in words, in members of their own, or pass on the headers of another server."""
    server.script(Raw(json.dumps({"error": error}).encode(), "application/json", status=429))
    with pytest.raises(RateLimited) as caught:
        ask(model, QUESTION)
    assert caught.value.retry_after_s == pytest.approx(pause_s)


@pytest.mark.parametrize("units", [1, 1_000])
def test_the_pause_may_end_at_a_moment(model: Made, server: OpenAIServer, units: int) -> None:
    """OpenRouter names the moment at which its limit ends, in milliseconds; others do in seconds."""
    ends_at = (SystemClock().now() + timedelta(seconds=42)).timestamp()
    headers = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(ends_at * units))}
    error = {"message": "Rate limit exceeded: free-models-per-min.", "code": 429, "metadata": {"headers": headers}}
    server.script(Raw(json.dumps({"error": error}).encode(), "application/json", status=429))
    with pytest.raises(RateLimited) as caught:
        ask(model, QUESTION)
    assert 30 < (caught.value.retry_after_s or 0) <= 42


# --- errors


def error(message: str, code: str | int | None = None, **members: Any) -> Wire:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None, **members}}


def of_router(raw: str) -> Wire:
    return error("Provider returned error", 400, metadata={"raw": raw, "provider_name": "Another"})


CLAUDES = json.dumps({"type": "error", "error": {"message": "prompt is too long: 200251 tokens > 200000 maximum"}})
TOO_LONG = [
    error("<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 129024]"),
    error("Invalid request: Your request exceeded model token limit: 8192"),
    {"error": {"code": "1261", "message": "Prompt exceeds max length"}},
    error("max_tokens must be at least 1, got -7584. (parameter=max_tokens, value=-7584)", 400, param="max_tokens"),
    error("The decoder prompt (length 5000) is longer than the maximum model length of 4096.", 400),
    of_router(CLAUDES),
    of_router("This model's maximum context length is 8192 tokens."),
    {"error": "Bad Request", "message": "This model's maximum context length is 8192 tokens."},
    {"error": True, "message": "This model's maximum context length is 8192 tokens."},
    error("string too long", "string_above_max_length", param="messages[3].content"),
]
FILTERED = [
    (400, error("Content Exists Risk")),
    (403, {"code": "permission-denied", "error": "Content violates usage guidelines. Failed check: SAFETY_CHECK"}),
    (400, {"contentFilter": [{"level": 1, "role": "user"}], "error": {"code": "1301", "message": "no"}}),
    (200, {"id": "1", "choices": None, "base_resp": {"status_code": 1026, "status_msg": "input new_sensitive"}}),
    (403, error("A model requires moderation on B. Your input was flagged for violence.", 403)),
    (403, error("Refused.", 403, metadata={"reasons": ["violence"], "flagged_input": "…"})),
]
MALFORMED = [
    error("Failed to call a function. Please adjust your prompt.", "tool_use_failed", failed_generation="<function=x"),
    error("tool call validation failed: parameters for tool calculator did not match schema: errors: []"),
    error("Failed to generate JSON. Please adjust your prompt.", "json_validate_failed"),
]
OF_THE_REQUEST = [
    error("string too long", "string_above_max_length", param="tools[13].function.description"),
    error("string too long", "string_above_max_length", param="safety_identifier"),
    error("Your account was flagged. Please contact support.", 403),
    of_router("temperature is too high"),
]


def refused(model: Made, server: OpenAIServer, status: int, body: Wire) -> PerdureError:
    server.script(Raw(json.dumps(body).encode(), status=status, content_type="application/json"))
    with pytest.raises(PerdureError) as caught:
        ask(model, QUESTION)
    return caught.value


@pytest.mark.parametrize("body", TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_prompt_that_is_too_long(model: Made, server: OpenAIServer, body: Wire) -> None:
    """So the turn builds a smaller prompt."""
    assert isinstance(refused(model, server, 400, body), ContextTooLong)


@pytest.mark.parametrize(("status", "body"), FILTERED, ids=range(len(FILTERED)))
def test_a_filtered_prompt(model: Made, server: OpenAIServer, status: int, body: Wire) -> None:
    """So later prompts leave the message out."""
    assert isinstance(refused(model, server, status, body), ContentFiltered)


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_a_call_that_the_server_could_not_read(model: Made, server: OpenAIServer, body: Wire) -> None:
    """So the model is asked again."""
    made = refused(model, server, 400, body)
    assert isinstance(made, InvalidResponse)
    assert made.transient


@pytest.mark.parametrize("body", OF_THE_REQUEST, ids=range(len(OF_THE_REQUEST)))
def test_another_refusal_says_nothing_about_the_prompt(model: Made, server: OpenAIServer, body: Wire) -> None:
    made = refused(model, server, 403 if body["error"]["code"] == 403 else 400, body)
    assert type(made) is ProviderError
    assert not made.transient


def test_an_option_that_a_server_behind_a_router_refuses_is_left_out(model: Made, server: OpenAIServer) -> None:
    body = of_router(json.dumps(error("Unsupported parameter: 'stream_options' is not supported with this model.")))
    server.script(Raw(json.dumps(body).encode(), status=400, content_type="application/json"), Answer("Yes."))
    assert ask(model, QUESTION).content == "Yes."
    assert "stream_options" not in server.requests[-1]


# --- the order of roles

CALLED = ToolCall("abcdefghi", "calculator", ONE)
STEERED = (
    Message(Role.USER, "What is 1?"),
    Message(Role.ASSISTANT, "", (CALLED,)),
    Message(Role.TOOL, "1", tool_call_id=CALLED.id),
    Message(Role.USER, "Make it 3."),
    Message(Role.USER, "Please."),
)
ORDERED = ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize(
    ("model_name", "said", "requests"),
    [
        pytest.param("mistral-large-latest", "", 1, id="known"),
        pytest.param("gemma", "Unexpected role 'user' after role 'tool'", 2, id="tool, user"),
        pytest.param(
            "gemma", "Conversation roles must alternate user/assistant/user/assistant/...", 2, id="user, user"
        ),
    ],
)
def test_no_users_message_follows_a_result_or_another_one(
    server: OpenAIServer, kind: str, model_name: str, said: str, requests: int
) -> None:
    """A turn that failed behind a tool's result leaves such a history, and so does a message that steers."""
    made = made_of(server, kind, model=model_name)
    if said:
        server.script(Status(400, message=said))
    server.script(Answer("Yes."))
    tool = ToolSchema("calculator", "Computes.", {"type": "object", "properties": {"expression": {"type": "string"}}})
    assert made.respond(ModelRequest(STEERED, (tool,)), new_call()).content == "Yes."
    made.close()
    assert len(server.requests) == requests
    sent = [each for each in server.requests[-1]["messages"] if each["role"] != "system"]
    assert [each["role"] for each in sent] == ORDERED
    assert "Make it 3." in json.dumps(sent[-1])
    assert "Please." in json.dumps(sent[-1])


def test_thoughts_that_a_server_refuses_are_left_out(server: OpenAIServer) -> None:
    """It names them with a "must", although it requires nothing."""
    made = made_of(server, "own")
    call = fragment(id="abcdefghi", function={"name": "calculator", "arguments": ONE})
    server.script(Chunks([delta(role="assistant", reasoning_content="Hm."), call, CALLS]))
    tool = ToolSchema("calculator", "Computes.", {"type": "object", "properties": {"expression": {"type": "string"}}})
    asked = Message(Role.USER, "What is 1?")
    first = made.respond(ModelRequest((asked,), (tool,)), new_call())
    said = (
        "'messages.1' : for 'role:assistant' the following must be satisfied[('messages.1' : property "
        "'reasoning_content' is unsupported)]"
    )
    server.script(Status(400, message=said), Answer("1"))
    replied = Message(Role.ASSISTANT, first.content, first.tool_calls, opaque=first.opaque)
    result = Message(Role.TOOL, "1", tool_call_id=first.tool_calls[0].id)
    assert made.respond(ModelRequest((asked, replied, result), (tool,)), new_call()).content == "1"
    made.close()
    assert "reasoning_content" not in json.dumps(server.requests[-1]["messages"])


@pytest.mark.parametrize(
    "said",
    [
        "Corrupted thought signature.",
        "Unable to submit request because Thought signature is not valid..",
        "messages.3.content.3: Invalid `signature` in `thinking` block",
    ],
)
@pytest.mark.parametrize("streams", [False, True], ids=["status", "stream"])
def test_signatures_that_a_server_refuses_are_left_out(server: OpenAIServer, said: str, *, streams: bool) -> None:
    """They end with an account or a key. The conversation goes on without them, and later ones are kept."""
    model = made_of(server, "own")
    signed = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": ONE}}
    signed["extra_content"] = {"google": {"thought_signature": "c2ln"}}
    refused = Chunks([{"error": {"message": said, "code": 400}}]) if streams else Status(400, message=said)
    server.script(Chunks([fragment(**signed), CALLS]), refused, Answer("Yes."), Answer("Yes."))
    reply = ask(model, QUESTION)
    said_before = Message(Role.ASSISTANT, "", reply.tool_calls, opaque=reply.opaque)
    for _ in range(2):
        assert ask(model, QUESTION, said_before, Message(Role.TOOL, "1", tool_call_id="a")).content == "Yes."
    assert ["c2ln" in json.dumps(each) for each in server.requests] == [False, True, False, True]
    model.close()


@pytest.mark.parametrize("begins", [False, True], ids=["at once", "after a text"])
def test_signatures_that_a_server_refuses_in_its_stream(messages: tuple[BlocksServer, Made], *, begins: bool) -> None:
    """A gateway opens the stream before its provider has read the prompt. After a text, nothing is asked again."""
    server, model = messages
    server.thinks = True
    server.script(Answer(calls=[Call("calculator", ONE, "c1")]))
    reply = ask(model, QUESTION)
    server.thinks = False
    error = {
        "message": "messages.1.content.0: Invalid `signature` in `thinking` block",
        "type": "invalid_request_error",
    }
    begun = events_of(Answer("It"))[:4] if begins else []
    server.script(Chunks([*begun, {"type": "error", "error": error}]), Answer("Yes."))
    called = Message(Role.ASSISTANT, "", reply.tool_calls, opaque=reply.opaque)
    conversation = (QUESTION, called, Message(Role.TOOL, "1", tool_call_id=reply.tool_calls[0].id))
    if begins:
        with pytest.raises(ProviderError):
            ask(model, *conversation)
    else:
        assert ask(model, *conversation).content == "Yes."
    assert ["signature" in json.dumps(each) for each in server.requests][1:] == [True, *[False] * (not begins)]
