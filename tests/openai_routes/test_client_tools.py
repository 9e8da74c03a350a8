"""A client's tools: the turn waits for their results, and goes on in the request that brings them."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from sqlalchemy import text
from starlette.testclient import TestClient

from perdure import Agent, ask_user, external_tool, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.channels.http.app import create_app
from perdure.clock import MovedClock
from perdure.database.engine import Executor
from perdure.models.protocol import ModelReply
from perdure.models.settings import NAMES
from perdure.runtime import Runtime
from perdure.sessions.conversations import change_conversation
from perdure.sessions.ending import read_conversation
from perdure.settings import OnBusy
from perdure.turns.additions import Additions
from perdure.turns.calls import client
from perdure.turns.calls.client import read_additions
from perdure.turns.calls.hastening import GRACE_S
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from tests.channels.conftest import BASE_URL
from tests.files.contents import png
from tests.turns.harness import until
from tests.turns.scripted import Scripted, calls, says

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Look.", "parameters": SCHEMA}}
TOOL: Any = {"type": "function", "name": "weather", "description": "Look.", "parameters": SCHEMA, "strict": False}
ASK = {"role": "user", "content": "Umbrella?"}
PARIS, OSLO = ("weather", {"city": "Paris"}), ("weather", {"city": "Oslo"})


@tool
def here(number: int) -> str:
    """Count.

    Args:
        number: The number.
    """
    return f"counted {number}"


@pytest.fixture
def agents() -> Agents:
    """An agent with a tool of its own, one with questions, and one with an external tool."""
    return Agents([
        Agent("assistant", "You help.", [here], settings={"max_tokens": 50}),
        Agent("asker", "You ask.", [ask_user(bool, name="ask_milk"), here]),
        Agent("outside", "You scan.", [external_tool("scan", "Scan.")]),
    ])  # fmt: skip


@pytest.fixture
def model() -> Scripted:
    """A model that takes all settings."""
    made = Scripted()
    made.supported_settings = frozenset(NAMES)  # type: ignore[attr-defined]
    return made


def _count(runtime: Runtime, table: str) -> int:
    with runtime.database.engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608 (constants)


def _rows(runtime: Runtime, statement: str) -> list[Any]:
    with runtime.database.engine.connect() as connection:
        return list(connection.execute(text(statement)))


def _create(sdk: openai.OpenAI, messages: list[Any], **more: Any) -> ChatCompletion:
    made = sdk.chat.completions.create(model="assistant", messages=messages, tools=[CHAT_TOOL], **more)
    assert isinstance(made, ChatCompletion)
    return made


def _answered(answer: ChatCompletion, *results: str) -> list[Any]:
    """The messages that go on after `answer`, whose calls have these results."""
    message = answer.choices[0].message
    ids = [each.id for each in message.tool_calls or ()]
    brought = zip(ids, results, strict=False)  # a client may lack the last ones
    tools = [{"role": "tool", "tool_call_id": each, "content": result} for each, result in brought]
    return [message.model_dump(exclude_none=True), *tools]


def test_a_chat_goes_on_with_the_results(sdk: openai.OpenAI, model: Scripted, running: Runtime) -> None:
    """Two calls, then one more, are one turn. The calls of the agent's own tools run here, and are not returned."""
    model.lines = [calls(PARIS, ("here", {"number": 2}), OSLO), calls(PARIS), says("Take one.")]
    messages: list[Any] = [ASK]
    first = _create(sdk, messages)
    assert first.choices[0].finish_reason == "tool_calls"
    asked = first.choices[0].message.tool_calls or []
    assert [json.loads(each.function.arguments)["city"] for each in asked if each.type == "function"] == [
        "Paris",
        "Oslo",
    ]
    messages += _answered(first, "wet", "dry")
    second = _create(sdk, messages)
    messages += _answered(second, "wetter")
    third = _create(sdk, messages)
    assert (third.choices[0].message.content, third.choices[0].finish_reason) == ("Take one.", "stop")
    assert _count(running, "turns") == 1
    assert [each.usage and each.usage.total_tokens for each in (first, second, third)] == [15, 15, 12]
    results = [each.content for each in model.requests[-1].messages if each.role == "tool"]
    assert results == ["wet", "counted 2", "dry", "wetter"]
    assert len({first.id, second.id, third.id}) == 3


@pytest.mark.long
def test_the_same_results_twice_do_nothing_twice(sdk: openai.OpenAI, model: Scripted, running: Runtime) -> None:
    """A repeated request gets the same answer: the calls again, or what followed. The first result counts."""
    model.lines = [calls(PARIS), says("Take one.")]
    first = _create(sdk, [ASK])
    again = _create(sdk, [ASK])
    assert again.choices[0].message == first.choices[0].message
    messages = [ASK, *_answered(first, "wet")]
    answers = [_create(sdk, messages), _create(sdk, messages), _create(sdk, [ASK, *_answered(first, "other")])]
    assert [each.choices[0].message.content for each in answers] == ["Take one."] * 3
    assert (_count(running, "turns"), len(model.requests)) == (1, 2)
    assert model.requests[-1].messages[-1].content == "wet"


@pytest.mark.long
def test_a_stream_ends_with_the_calls(sdk: openai.OpenAI, model: Scripted) -> None:
    """The chunks have the text, then each call with its index, then the reason."""
    model.lines = [calls(PARIS, OSLO), says("Take one.")]
    with sdk.chat.completions.stream(model="assistant", messages=[ASK], tools=[CHAT_TOOL]) as stream:  # type: ignore[list-item]
        for _ in stream:
            pass
        first = stream.get_final_completion()
    assert first.choices[0].finish_reason == "tool_calls"
    assert [each.function.name for each in first.choices[0].message.tool_calls or ()] == ["weather", "weather"]
    messages = [ASK, *_answered(first, "wet", "dry")]
    chunks = list(
        sdk.chat.completions.create(
            model="assistant", messages=messages, tools=[CHAT_TOOL], stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "Take one."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 12


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_responses_have_function_calls(sdk: openai.OpenAI, model: Scripted, running: Runtime, streams: bool) -> None:
    """Each response of a turn has an id of its own, is found again by it, and is chained by `previous_response_id`."""
    model.lines = [calls(PARIS, OSLO), says("Take one.")]

    def create(given: Any, **more: Any) -> Any:
        if not streams:
            return sdk.responses.create(model="assistant", input=given, tools=[TOOL], **more)
        with sdk.responses.stream(model="assistant", input=given, tools=[TOOL], **more) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    first = create("Umbrella?")
    asked = [each for each in first.output if each.type == "function_call"]
    assert [json.loads(each.arguments)["city"] for each in asked] == ["Paris", "Oslo"]
    assert (first.status, first.tools[0].name) == ("completed", "weather")
    results = [{"type": "function_call_output", "call_id": each.call_id, "output": "wet"} for each in asked]
    second = create(results, previous_response_id=first.id)
    assert (second.output_text, second.status) == ("Take one.", "completed")
    assert second.id != first.id
    for each in (first, second):
        found = sdk.responses.retrieve(each.id)
        assert [item.model_dump(exclude={"parsed_arguments"}) for item in found.output] == [
            {name: value for name, value in item.model_dump().items() if not name.startswith("parsed")}
            for item in each.output
        ] or streams
        assert (found.output_text, found.usage) == (each.output_text, each.usage)
        replayed = list(sdk.responses.retrieve(each.id, stream=True))
        assert replayed[-1].type == "response.completed"
        assert replayed[-1].response.output_text == each.output_text
    assert _count(running, "turns") == 1


def test_a_response_that_is_read_again(sdk: openai.OpenAI, model: Scripted) -> None:
    """It has what its own request said, in each exchange of its turn. An exchange that does not exist is not found."""
    model.lines = [says("Hello."), calls(PARIS), says("Take one.")]
    before = sdk.responses.create(model="assistant", input="hello", tools=[TOOL])
    first = sdk.responses.create(
        model="assistant", input="Umbrella?", tools=[TOOL], previous_response_id=before.id, background=True
    )
    until(lambda: sdk.responses.retrieve(first.id).status == "completed", "the call is made")
    [call] = [each for each in sdk.responses.retrieve(first.id).output if each.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    second = sdk.responses.create(model="assistant", input=[result], previous_response_id=first.id)
    said = {before.id: (False, None), first.id: (True, before.id), second.id: (False, first.id)}
    for name, expected in said.items():
        streamed = list(sdk.responses.retrieve(name, stream=True))[-1]
        assert streamed.type == "response.completed"
        for found in (sdk.responses.retrieve(name), sdk.responses.cancel(name), streamed.response):
            assert (found.background, found.previous_response_id) == expected
    for unknown in (f"{first.id}_77", f"{second.id}7"):
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(unknown)


def test_a_lacking_result_is_refused_as_openai_does(sdk: openai.OpenAI, model: Scripted) -> None:
    """A request with some of the results changes nothing; one with an unknown call names it."""
    model.lines = [calls(PARIS, OSLO), says("Take one.")]
    first = _create(sdk, [ASK])
    messages = [ASK, *_answered(first, "wet")]
    with pytest.raises(openai.BadRequestError, match="did not have response messages"):
        _create(sdk, messages)
    unknown = {"role": "tool", "tool_call_id": f"call_{'0' * 32}", "content": "wet"}
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\]\.tool_call_id: there is no such call"):
        _create(sdk, [ASK, unknown])
    with pytest.raises(openai.BadRequestError, match="there is no such call"):
        _create(sdk, [ASK, *_answered(first, "wet", "dry")], user="another")
    assert _create(sdk, [ASK, *_answered(first, "wet", "dry")]).choices[0].message.content == "Take one."


def test_a_client_that_goes_on_without_results(sdk: openai.OpenAI, model: Scripted, running: Runtime) -> None:
    """A newer message closes the calls that the client's history has: their turn ends, and the message is answered."""
    model.lines = [calls(PARIS), says("Without weather."), says("Hello.")]
    first = _create(sdk, [ASK])
    messages = [ASK, first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "hello"}]
    assert _create(sdk, messages).choices[0].message.content == "Hello."
    assert _count(running, "turns") == 2
    assert "The client went on without a result." in model.requests[1].messages[-1].content


def test_a_client_that_never_answers(
    sdk: openai.OpenAI, model: Scripted, running: Runtime, clock: MovedClock, http: TestClient
) -> None:
    """After the time limit of an approval, the model is told that the outcome is unknown, and the turn ends."""
    model.lines = [calls(PARIS), says("No weather.")]
    first = _create(sdk, [ASK])
    turn = http.get(f"/v1/turns/{first.id.removeprefix('chatcmpl-')}").json()
    assert turn["waiting_for"]["kind"] == "client"
    clock.advance(timedelta(seconds=running.settings.approval.expires_s + 1))
    running.wake.session(turn["session_id"], 5)
    late = _create(sdk, [ASK, *_answered(first, "wet")])
    assert late.choices[0].message.content == "No weather."


@pytest.mark.long
def test_a_client_that_ends_its_run_with_a_call(
    sdk: openai.OpenAI, model: Scripted, running: Runtime, clock: MovedClock
) -> None:
    """Some clients take a call for their output, and bring no result: the next message waits for 30 seconds only."""
    model.lines = [calls(PARIS), says("No result."), says("Hello.")]
    _create(sdk, [ASK])
    waiting = sdk.responses.create(model="assistant", input="hello", background=True)
    with running.database.engine.connect() as connection:
        left_s = text("SELECT extract(epoch FROM s.not_before - perdure_now()) FROM sessions AS s")
        assert 0 < connection.execute(left_s).scalar_one() <= GRACE_S
        [session_id] = connection.execute(text("SELECT session_id FROM sessions")).scalars()
    clock.advance(timedelta(seconds=GRACE_S + 1))
    running.wake.session(session_id, 5)
    until(lambda: sdk.responses.retrieve(waiting.id).status == "completed", "the next message is answered")
    assert sdk.responses.retrieve(waiting.id).output_text == "Hello."


@pytest.mark.parametrize("path", ["chat", "responses"])
def test_a_result_has_an_image(sdk: openai.OpenAI, model: Scripted, running: Runtime, path: str) -> None:
    """It reaches a model that reads images; a line stands for what is no file. It refuses no later request either."""
    model.reads = frozenset({"image/png"})  # type: ignore[attr-defined]
    model.lines = [calls(PARIS), says("A cat."), says("Hello.")]
    image = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    if path == "chat":
        first = _create(sdk, [ASK])
        message, brought = _answered(first, "")
        parts: list[Any] = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": image}}]
        brought["content"] = [*parts, {"type": "image_url", "image_url": {"url": "data:,-"}}, {"type": "input_audio"}]
        history = [ASK, message, brought]
    else:
        begun = sdk.responses.create(model="assistant", input="Umbrella?", tools=[TOOL])
        [call] = [each for each in begun.output if each.type == "function_call"]
        parts = [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": image}]
        parts += [{"type": "input_image", "image_url": "data:,-"}, {"type": "computer_screenshot"}]
        item = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        history = [ASK, item, {"type": "function_call_output", "call_id": call.call_id, "output": parts}]

    def say(messages: list[Any]) -> str | None:
        if path == "chat":
            return _create(sdk, messages).choices[0].message.content
        return sdk.responses.create(model="assistant", input=messages, tools=[TOOL]).output_text

    assert say(history) == "A cat."
    [result] = [each for each in model.requests[1].messages if each.role == "tool"]
    assert [each.data for each in result.files] == [png()]
    text, line, bad, other = result.content.split("\n")
    assert (text, line.startswith("[image: image/png, 4 by 3 pixels")) == ("Look:", True)
    assert bad == "[image: left out: The data cannot be decoded: accepted: Base64, without line breaks.]"
    assert other in {"[input_audio: left out]", "[computer_screenshot: left out]"}
    assert say([*history, {"role": "user", "content": "hello"}]) == "Hello."
    assert (_count(running, "turns"), _count(running, "files")) == (2, 1)


def test_no_old_result_refuses_a_request(sdk: openai.OpenAI, http: TestClient) -> None:
    """Of any form: only the newest results are those of the request, and they are text or a list of parts."""
    old: Any = {"role": "tool", "tool_call_id": f"call_{'0' * 32}", "content": 5}
    assert sdk.chat.completions.create(model="assistant", messages=[old, ASK]).choices[0].message.content == "ok"  # type: ignore[list-item]
    refused = http.post("/v1/chat/completions", json={"model": "assistant", "messages": [ASK, old]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[1].content")


@pytest.mark.long
def test_results_of_two_turns_are_refused(sdk: openai.OpenAI, model: Scripted, running: Runtime) -> None:
    """A request goes on with one turn. A result of another turn that waits is not ignored, and nothing is recorded."""
    model.lines = [calls(PARIS), calls(OSLO)]
    asked = [_create(sdk, [ASK], extra_headers={"X-Perdure-Conversation": each}) for each in ("a", "b")]
    brought = [_answered(each, "wet")[1] for each in asked]
    with pytest.raises(openai.BadRequestError, match="another turn") as refused:
        _create(sdk, [ASK, *brought])
    assert refused.value.param == "messages[1].tool_call_id"
    with running.database.engine.connect() as connection:
        assert connection.execute(text("SELECT DISTINCT status FROM turns")).scalars().all() == ["parked"]


@pytest.mark.parametrize("is_behind", [True, False], ids=["before it waits", "while it waits"])
def test_a_message_of_another_channel_behind_a_clients_call(
    sdk: openai.OpenAI, model: Scripted, running: Runtime, *, is_behind: bool
) -> None:
    """The message waits for 30 seconds only, whatever its channel, and even if the turn was running when it came.

    A killed process cannot leave a longer wait: the commit that accepts the message, or parks the turn, shortens it.
    """
    commits: list[str] = []
    running.database.observe = lambda moment, name: commits.append(name) if moment == "after" else None

    def send() -> None:
        accept(running, Incoming(user=UserKey("local"), text="hello", channel="telegram"))

    def ask(*_: Any) -> ModelReply:
        if is_behind:
            send()
        return calls(PARIS)

    model.lines = [ask]
    _create(sdk, [ASK])
    if not is_behind:
        send()
    left_s = text("SELECT extract(epoch FROM not_before - perdure_now()) FROM sessions WHERE unsettled = 2")

    def is_hastened() -> bool:
        with running.database.engine.connect() as connection:
            return bool(0 < connection.execute(left_s).scalar_one() <= GRACE_S)

    until(is_hastened, "the wait is shortened")
    assert "turns.hasten" not in commits
    assert ("turns.wait_calls" if is_behind else "turns.accept") in commits


def test_an_external_tool_of_the_agent_is_not_the_clients(
    sdk: openai.OpenAI, model: Scripted, http: TestClient
) -> None:
    """The calls of the agent's own external tools are not returned: another service brings their results."""
    model.lines = [calls(("scan", {})), says("Scanned.")]
    background = sdk.responses.create(model="outside", input="scan", tools=[TOOL], background=True)
    turn_id = background.id.removeprefix("resp_")
    for _ in range(200):
        turn = http.get(f"/v1/turns/{turn_id}").json()
        if turn["status"] == "parked":
            break
    assert sdk.responses.retrieve(background.id).status == "in_progress"
    [call] = turn["pending_calls"]
    http.post(f"/v1/turns/{turn_id}/results", json={"call_id": call["call_id"], "result": "7"})
    while sdk.responses.retrieve(background.id).status == "in_progress":
        pass
    assert sdk.responses.retrieve(background.id).output_text == "Scanned."


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_a_question_is_the_answer(sdk: openai.OpenAI, model: Scripted, running: Runtime, streams: bool) -> None:
    """A question of the agent is the assistant's answer. The user's next message answers it, also the same twice."""
    model.lines = [
        calls(("ask_milk", {"question": "Milk?"})),
        calls(("ask_milk", {"question": "Sugar?"})),
        says("Here."),
    ]

    def say(said: str) -> str:
        messages: Any = [{"role": "user", "content": said}]
        if not streams:
            made = sdk.chat.completions.create(model="asker", messages=messages)
            assert made.choices[0].finish_reason == "stop"
            return str(made.choices[0].message.content)
        chunks = sdk.chat.completions.create(model="asker", messages=messages, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)

    assert say("tea") == "Milk?"
    assert say("hm") == "Please answer yes or no.\nMilk?"
    assert say("yes") == "Sugar?"
    assert say("yes") == "Here."
    assert _count(running, "turns") == 1


@pytest.mark.parametrize("streams", [False, True])
def test_a_message_that_steers_after_a_question(running: Runtime, model: Scripted, *, streams: bool) -> None:
    """A message that joins a turn after its question was answered gets what follows, and not the old question."""
    turn = running.settings.turn.model_copy(update={"on_busy": OnBusy.STEER})
    steered = replace(running, settings=running.settings.model_copy(update={"turn": turn}))
    running.wake.runtime = steered  # type: ignore[attr-defined]
    answers: list[str] = []

    def say(said: str) -> str:
        messages: Any = [{"role": "user", "content": said}]
        if not streams:
            return str(sdk.chat.completions.create(model="asker", messages=messages).choices[0].message.content)
        chunks = sdk.chat.completions.create(model="asker", messages=messages, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)

    third = threading.Thread(target=lambda: answers.append(say("and cake")))

    def busy(*_: Any) -> ModelReply:
        third.start()
        until(lambda: _count(running, "turns") == 2, "the third message is accepted")
        return calls(("here", {"number": 1}))

    model.lines = [calls(("ask_milk", {"question": "Milk?"})), busy, says("Here, with cake.")]
    with TestClient(create_app(steered, lambda: True), base_url=BASE_URL) as http:
        sdk = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", http_client=http, max_retries=0)
        assert say("tea") == "Milk?"
        assert say("yes") == "Here, with cake."
        third.join(20)
    assert answers == ["Here, with cake."]
    assert _count(running, "turns") == 1


class Weather(BaseModel):
    """An output."""

    city: str
    rain: bool


def test_members_reach_the_model(sdk: openai.OpenAI, model: Scripted) -> None:
    """Instructions follow the agent's; settings replace the agent's, and may not raise its limit of tokens."""
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "In French."}, ASK]
    answer = sdk.chat.completions.create(
        model="assistant", messages=messages, tools=[CHAT_TOOL], tool_choice="required", parallel_tool_calls=False,
        temperature=1, top_p=0.5, seed=7, stop="END", max_completion_tokens=900, frequency_penalty=1,
        presence_penalty=1, logit_bias={"5": 1}, reasoning_effort="low", metadata={"page": "3"}, store=True, n=1,
    )  # fmt: skip
    assert answer.metadata == {"page": "3"}
    [request] = model.requests
    assert request.messages[0].content.startswith("You help.\n\nBe brief.\n\nIn French.")
    assert request.settings == {
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "top_p": 0.5, "seed": 7,
        "stop_sequences": ["END"], "max_tokens": 50, "frequency_penalty": 1, "presence_penalty": 1,
        "logit_bias": {"5": 1}, "reasoning_effort": "low",
    }  # fmt: skip
    sdk.responses.create(
        model="assistant", input="hello", instructions="Be long.", max_output_tokens=20, tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"}, reasoning={"effort": "high"}, user="bob",
    )  # fmt: skip
    request = model.requests[-1]
    assert request.messages[0].content.startswith("You help.\n\nBe long.")
    assert request.settings == {"max_tokens": 20, "tool_choice": ["weather"], "reasoning_effort": "high"}


def test_an_output_is_enforced(sdk: openai.OpenAI, model: Scripted) -> None:
    """The model is given the schema, and answers again if its reply is no JSON object."""
    model.lines = [says("It rains."), says('{"city": "Paris", "rain": true}'), says('{"city": "Oslo", "rain": false}')]
    parsed = sdk.chat.completions.parse(model="assistant", messages=[ASK], response_format=Weather)  # type: ignore[list-item]
    assert parsed.choices[0].message.parsed == Weather(city="Paris", rain=True)
    assert (model.requests[0].output or {})["properties"].keys() == {"city", "rain"}
    answer = sdk.responses.parse(model="assistant", input="And Oslo?", text_format=Weather)
    assert answer.output_parsed == Weather(city="Oslo", rain=False)


def test_a_later_request_replaces_the_additions(sdk: openai.OpenAI, model: Scripted) -> None:
    """The request that brings results may have other settings and tools, as clients that force the first call do."""
    model.lines = [calls(PARIS), says("Take one.")]
    first = _create(sdk, [ASK], tool_choice="required", temperature=1)
    messages = [ASK, *_answered(first, "wet")]
    sdk.chat.completions.create(model="assistant", messages=messages, temperature=0)
    assert model.requests[0].settings == {"tool_choice": "required", "temperature": 1.0, "max_tokens": 50}
    assert model.requests[1].settings == {"temperature": 0.0, "max_tokens": 50}
    assert [each.name for each in model.requests[1].tools] == ["here"]


def test_tools_are_only_of_their_turn(sdk: openai.OpenAI, model: Scripted) -> None:
    """The next turn of the conversation does not have them."""
    _create(sdk, [ASK])
    sdk.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "hello"}])
    assert [[each.name for each in request.tools] for request in model.requests] == [["here", "weather"], ["here"]]


def test_nothing_of_a_turn_that_is_not_stored_is_remembered(
    sdk: openai.OpenAI, model: Scripted, running: Runtime, http: TestClient
) -> None:
    """With `store` false, the turn is neither found nor summarised. Erasing the user erases the additions, too."""
    sdk.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "my secret"}], store=False)
    _create(sdk, [ASK, {"role": "user", "content": "Not a secret."}], store=True)
    with running.database.engine.connect() as connection:
        found = connection.execute(
            text("SELECT m.content FROM message_words JOIN messages AS m USING (session_id, seq)")
        )
        assert {row.content for row in found} == {"Not a secret.", "ok"}
        [session_id] = connection.execute(text("SELECT session_id FROM sessions")).scalars()
    said = [each.content for each in read_conversation(running.database, session_id, 20)]
    assert sorted(said) == ["Not a secret.", "ok"]
    assert http.delete("/v1/users/local").status_code == 200
    assert (_count(running, "turns"), _count(running, "tool_effects")) == (0, 0)


def test_a_later_request_may_forget_a_turn(sdk: openai.OpenAI, model: Scripted, running: Runtime) -> None:
    """If the request with the results has `store` false, what the turn has said before is no longer found either."""
    model.lines = [calls(PARIS), says("Take one.")]
    first = _create(sdk, [ASK], store=True)
    assert _count(running, "message_words") == 1
    _create(sdk, [ASK, *_answered(first, "wet")], store=False)
    assert (_count(running, "message_words"), _count(running, "unembedded")) == (0, 0)


def test_results_bring_back_no_turn_whose_conversation_is_left_out_meanwhile(
    sdk: openai.OpenAI, model: Scripted, running: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request with the results has read the turn's additions. Nothing of the turn is remembered all the same."""

    def read(executor: Executor, turn_id: UUID) -> Additions:
        found = read_additions(executor, turn_id)
        wake, user = running.wake, UserKey("local")
        change_conversation(running.database, wake, user, "private", title=None, archived=None, remember=False)
        return found

    model.lines = [calls(PARIS), says("Take one.")]
    first = _create(sdk, [ASK], prompt_cache_key="private")
    monkeypatch.setattr(client, "read_additions", read)
    _create(sdk, [ASK, *_answered(first, "wet")], prompt_cache_key="private")
    assert (_count(running, "message_words"), _count(running, "unembedded")) == (0, 0)
    [session_id] = [each.session_id for each in _rows(running, "SELECT session_id FROM sessions")]
    assert read_conversation(running.database, session_id, 20) == []


def test_an_answer_may_forget_a_turn(sdk: openai.OpenAI, model: Scripted, running: Runtime) -> None:
    """The user's answer to a question belongs to the turn that asked: with `store` false, nothing of it is found."""
    model.lines = [calls(("ask_milk", {"question": "Milk?"})), says("Here.")]
    for said, store in (("tea", True), ("yes", False)):
        sdk.chat.completions.create(model="asker", messages=[{"role": "user", "content": said}], store=store)
    assert (_count(running, "turns"), _count(running, "message_words"), _count(running, "unembedded")) == (1, 0, 0)


@pytest.mark.parametrize("store", [True, False])
def test_no_case_is_made_of_a_turn_that_is_not_stored(
    sdk: openai.OpenAI, running: Runtime, http: TestClient, *, store: bool
) -> None:
    """A positive score makes a case of a turn, unless nothing of it may be remembered."""
    made = sdk.responses.create(model="assistant", input="my secret", store=store)
    [turn_id] = [each.turn_id for each in _rows(running, "SELECT turn_id FROM turns")]
    assert made.output_text == "ok"
    assert http.post(f"/v1/turns/{turn_id}/feedback", json={"score": 1}).status_code == 202
    assert _count(running, "cases") == int(store)


@pytest.mark.parametrize(
    ("ends", "reason"), [("content_filter", "content_filter"), ("length", "length")], ids=["filtered", "cut off"]
)
def test_a_reply_without_a_text_has_its_reason(sdk: openai.OpenAI, model: Scripted, ends: str, reason: Any) -> None:
    """A filtered reply, and one whose tokens were used up before a text, are ends of an answer and no errors."""
    empty = replace(says(""), stop_reason=ends)
    model.lines = [empty, empty, empty, empty]
    messages: Any = [{"role": "user", "content": "hello"}]
    [choice] = sdk.chat.completions.create(model="assistant", messages=messages).choices
    assert (choice.finish_reason, choice.message.content) == (reason, "")
    chunks = list(sdk.chat.completions.create(model="assistant", messages=messages, stream=True))
    assert chunks[-1].choices[0].finish_reason == reason
    made = sdk.responses.create(model="assistant", input="hello")
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == {"length": "max_output_tokens"}.get(reason, reason)
    events = list(sdk.responses.create(model="assistant", input="hello again", stream=True))
    assert events[-1].type == "response.incomplete"
    assert sdk.responses.retrieve(made.id).status == "incomplete"


@pytest.mark.long
def test_forms_that_servers_have_refused(sdk: openai.OpenAI, model: Scripted) -> None:
    """Clients send back null and empty contents, parts in place of texts, and items that only other servers know."""
    model.lines = [calls(PARIS), says("Take one.")]
    system: Any = {"role": "system", "content": []}
    first = _create(sdk, [system, ASK])
    [message, brought] = _answered(first, "wet")
    brought["content"] = [{"type": "text", "text": "wet"}]
    said = {"role": "assistant", "content": ""}
    messages = [system, said, ASK, {**message, "content": None}, brought]
    assert _create(sdk, messages).choices[0].message.content == "Take one."
    model.lines = [calls(PARIS), says("Take two.")]
    begun = sdk.responses.create(model="assistant", input="And now?", tools=[TOOL])
    [call] = [each for each in begun.output if each.type == "function_call"]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None, "content": None},
        {"type": "agent_reasoning", "text": "hm"},
        {"type": "item_reference", "id": call.id},
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "dry"}]},
    ]
    ended = sdk.responses.create(model="assistant", input=items, tools=[TOOL], store=False)
    assert ended.output_text == "Take two."
    assert [each.content for each in model.requests[-1].messages if each.role == "tool"] == ["wet", "dry"]
