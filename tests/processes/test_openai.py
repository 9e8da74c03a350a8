"""The official `openai` SDK, unchanged, against a real gateway and real workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit
from uuid import UUID

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from pytest_celery import CeleryTestSetup

from tests.models.server import Answer
from tests.processes.faults import wait_until
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

STORY = " ".join(f"word{number}" for number in range(60))
PATIENCE_S = 30.0


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """The SDK with another base URL and no other change."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=PATIENCE_S) as made:
        yield made


def _ask(client: openai.OpenAI, text: str, **more: object) -> str:
    answer = client.chat.completions.create(
        model="tester",
        user="ana",
        messages=[{"role": "user", "content": text}],
        **more,  # type: ignore[call-overload]
    )
    return str(answer.choices[0].message.content)


def _turns(installation: Installation) -> int:
    return int(installation.query("SELECT count(*) FROM turns")[0][0])


def test_the_sdk_talks_to_a_durable_agent(
    celery_setup: CeleryTestSetup, installation: Installation, client: openai.OpenAI
) -> None:
    """The SDK lists models, and creates completions and responses, including streams and background responses."""
    installation.model_server.answers["tell"] = Answer(STORY, piece=5, interval_s=0.01)
    assert [each.id for each in client.models.list()] == ["tester"]

    whole = client.chat.completions.create(model="tester", user="ana", messages=[{"role": "user", "content": "hello"}])
    assert whole.choices[0].message.content == answer_to("hello")
    assert whole.usage is not None
    assert whole.usage.total_tokens == 18

    chunks = list(
        client.chat.completions.create(
            model="tester", user="ana", messages=[{"role": "user", "content": "tell"}], stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    texts = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(texts) == STORY
    assert len(texts) > 5, "the text arrived in pieces"
    assert chunks[-1].usage is not None
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "stop"

    response = client.responses.create(model="tester", user="ana", input="and now?")
    assert response.output_text == answer_to("and now?")
    assert response.status == "completed"
    following = client.responses.create(model="tester", user="ana", input="further", previous_response_id=response.id)
    assert following.output_text == answer_to("further")
    assert client.responses.retrieve(response.id).output_text == response.output_text

    installation.model_server.answers["tell again"] = Answer(STORY, piece=5, interval_s=0.01)
    with client.responses.stream(model="tester", user="ana", input="tell again") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == STORY == final.output_text

    background = client.responses.create(model="tester", user="ana", input="tell", background=True)
    assert background.status in {"queued", "in_progress"}
    assert client.responses.create(model="tester", user="ana", input="tell", background=True).id == background.id
    wait_until(
        lambda: client.responses.retrieve(background.id).status == "completed", "the response is complete", PATIENCE_S
    )
    assert client.responses.retrieve(background.id).output_text == STORY
    installation.check()


@pytest.mark.long
def test_only_the_newest_message_is_sent_and_the_rest_is_known(
    celery_setup: CeleryTestSetup, installation: Installation, client: openai.OpenAI
) -> None:
    """The client sends only its newest message. The earlier messages in the prompt come from the database."""
    _ask(client, "my name is Ana", extra_headers={"X-Perdure-Conversation": "names"})
    _ask(client, "what is my name?", extra_headers={"X-Perdure-Conversation": "names"})
    sent = installation.model_server.server.requests[-1]["messages"]
    prompt = [each["content"] for each in sent if each["role"] != "system"]
    assert prompt == ["my name is Ana", answer_to("my name is Ana"), "what is my name?"]
    [row] = installation.query("SELECT conversation, title FROM conversations")
    assert tuple(row) == ("names", "my name is Ana")


@pytest.mark.long
def test_a_repeated_text_is_a_new_message_and_a_retry_is_not(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    """A retry after a lost connection joins the same turn. The same text after a complete answer is a new turn."""
    assert _ask(client, "ok") == _ask(client, "ok") == answer_to("ok")
    assert _turns(installation) == 2
    same = {"Idempotency-Key": "key-1"}
    assert _ask(client, "pay", extra_headers=same) == _ask(client, "pay", extra_headers=same)
    assert _turns(installation) == 3

    gate = installation.model_server.gate("later")
    body = b'{"model": "tester", "user": "ana", "messages": [{"role": "user", "content": "later"}]}'
    where = urlsplit(gateway.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert gate.arrived.wait(PATIENCE_S)  # the message is accepted and its turn runs
    gate.opened.set()
    assert _ask(client, "later") == answer_to("later")
    assert _turns(installation) == 4
    assert _ask(client, "later") == answer_to("later")
    assert _turns(installation) == 5, "the answer was sent, so this is a new message"


@pytest.mark.long
def test_a_response_resumes_after_the_gateway_was_killed(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    """After the gateway is killed and restarted, a stream with `starting_after` continues with the next event."""
    installation.model_server.answers["tell"] = Answer(STORY, piece=5, interval_s=0.03)
    texts, last = [], 0
    stream = client.responses.create(model="tester", user="ana", input="tell", stream=True, background=True)
    response_id = ""
    for event in stream:
        last = event.sequence_number
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            texts.append(event.delta)
            if len(texts) == 8:
                break
    gateway.kill()
    gateway.start()
    for event in client.responses.retrieve(response_id, stream=True, starting_after=last):
        assert event.sequence_number > last
        last = event.sequence_number
        if event.type == "response.output_text.delta":
            texts.append(event.delta)
    assert "".join(texts) == STORY
    again = [
        event.delta
        for event in client.responses.retrieve(response_id, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert again == texts


@pytest.mark.exhaustive
def test_tool_calls_are_reasoning_at_any_gateway(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    """Tool calls appear as reasoning in a stream, in a whole response, and in a stream that is resumed at any event."""
    with client.responses.stream(model="tester", user="ana", input="pure: one") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.reasoning_summary_text.delta") == 1
    [message, reasoning] = final.output
    assert message.type == "message"
    assert reasoning.type == "reasoning"
    assert [each.text.split()[0] for each in reasoning.summary] == ["pure"]
    whole = client.responses.retrieve(final.id)
    assert whole.output_text == final.output_text
    assert [each.id for each in whole.output] == [message.id, reasoning.id]

    live = [*client.responses.create(model="tester", user="ana", input="pure: two", stream=True)]
    [created] = [each for each in live if each.type == "response.created"]
    gateway.kill()
    gateway.start()
    for position, event in enumerate(live[:-1]):
        rest = client.responses.retrieve(created.response.id, stream=True, starting_after=event.sequence_number)
        found = [(each.type, each.sequence_number) for each in rest]
        assert found == [(each.type, each.sequence_number) for each in live[position + 1 :]]


@pytest.mark.exhaustive
def test_cancelled_and_failed_turns(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    """The response of a cancelled turn is `cancelled`. For a failed turn, the SDK raises an error without a retry."""
    gate = installation.model_server.gate("wait")
    made = client.responses.create(model="tester", user="ana", input="wait", background=True)
    assert gate.arrived.wait(PATIENCE_S)
    cancelled = client.responses.cancel(made.id)
    gate.opened.set()
    wait_until(
        lambda: client.responses.retrieve(made.id).status == "cancelled", "the response is cancelled", PATIENCE_S
    )
    assert cancelled.id == made.id
    installation.model_server.answers["nothing"] = Answer("")
    with pytest.raises(openai.APIStatusError) as failed:
        _ask(client, "nothing")
    assert failed.value.code == "INVALID_RESPONSE"
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert _turns(installation) == 2


@pytest.mark.long
def test_bad_requests_have_openais_shape(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    """An error has the members of OpenAI's errors, and names a wrong parameter. No bad request becomes a turn."""
    hello = [{"role": "user", "content": "hello"}]
    sound = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]}]
    cases: list[tuple[str, dict[str, object], int, str | None]] = [
        ("/chat/completions", {"model": "nobody", "user": "ana", "messages": hello}, 404, "model"),
        ("/chat/completions", {"model": "tester", "user": "ana", "messages": sound}, 400, "messages[0].content[0]"),
        ("/chat/completions", {"model": "tester", "user": "ana", "messages": hello, "n": 2}, 400, "n"),
        (
            "/chat/completions",
            {"model": "tester", "user": "ana", "messages": hello, "tools": [{}]},
            400,
            "tools[0].type",
        ),
        ("/chat/completions", {"model": "tester", "user": "ana", "messages": []}, 400, None),
        ("/responses", {"model": "tester", "user": "ana", "input": "x", "previous_response_id": "resp_x"}, 404, None),
    ]
    for path, body, status, param in cases:
        answer = httpx2.post(f"{gateway.url}/v1{path}", json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, body
    unknown = httpx2.get(f"{gateway.url}/v1/responses/resp_{UUID(int=7).hex}")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert _turns(installation) == 0


@pytest.mark.exhaustive
def test_a_front_ends_title_request_is_no_turn(
    celery_setup: CeleryTestSetup, installation: Installation, client: openai.OpenAI
) -> None:
    """The gateway answers a front end's request for a title or tags without a turn."""
    for name, prompt in (("X-OpenWebUI-Task", "### Task:\nGenerate a title."), ("X-Perdure-Task", "Tag this")):
        assert _ask(client, prompt, extra_headers={name: "tags_generation"}) == answer_to(prompt)
    assert _turns(installation) == 0


@pytest.mark.exhaustive
def test_a_stopping_gateway_ends_a_stream_with_an_error(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    """A gateway that shuts down ends a stream with an error. A repeated request gets the same turn's whole answer."""
    installation.model_server.answers["tell"] = Answer(STORY, piece=3, interval_s=0.15)
    stream = client.chat.completions.create(
        model="tester", user="ana", messages=[{"role": "user", "content": "tell"}], stream=True
    )
    next(iter(stream))
    began = time.monotonic()
    gateway.stop()
    with pytest.raises(openai.APIError) as ended:
        list(stream)
    assert ended.value.code == "gateway_stopping"
    assert time.monotonic() - began < PATIENCE_S
    gateway.start()
    assert _ask(client, "tell") == STORY
    assert _turns(installation) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_a_reply_that_is_filtered_while_it_streams(
    celery_setup: CeleryTestSetup, installation: Installation, client: openai.OpenAI, route: str
) -> None:
    """The stream ends as OpenAI's does: with the text so far, and the reason. Nothing is withdrawn."""
    filtered = Answer(STORY, piece=5, interval_s=0.01, finish_reason="content_filter")
    installation.model_server.answers["tell"] = filtered
    if route == "chat":
        asked: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "tell"}]
        chunks = list(client.chat.completions.create(model="tester", messages=asked, stream=True))
        assert STORY.startswith("".join(each.choices[0].delta.content or "" for each in chunks))
        assert chunks[-1].choices[0].finish_reason == "content_filter"
        assert len(chunks) > 5, "the text arrived in pieces"
    else:
        events = list(client.responses.create(model="tester", input="tell", stream=True))
        last = events[-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details is not None
        assert last.response.incomplete_details.reason == "content_filter"
        assert "response.output_text.delta" in {each.type for each in events}
