"""Models of OpenAI's Responses API, whose reasoning is encrypted and comes back with the next prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import InvalidResponse
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.protocol import Message, ModelCall, Role, Usage
from perdure.models.providers.endpoint import Endpoint
from perdure.settings import Settings
from perdure.testing.suites.models import QUESTION, STATEMENT, ask
from tests.models.openai_server import OpenAIServer
from tests.models.server import Chunks, Status, Wire


class ResponsesServer(OpenAIServer):
    """Streams scripted events of the Responses API."""

    def judge(self, path: str, body: Wire) -> Status | None:
        return None if path == "/v1/responses" else Status(404, message=f"no route {path}")

    def frame(self, chunk: Any) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (chunk["type"].encode(), json.dumps(chunk).encode())


def response(status: str, output: list[Wire], **more: Any) -> dict[str, Any]:
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "gpt-test", "status": status, "output": output,
        "error": None, "incomplete_details": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "metadata": {}, **more,
    }  # fmt: skip


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "secret-of-the-vendor"}
CALL = {
    "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "calculator", "status": "completed",
    "arguments": '{"expression": "12*7+5"}',
}  # fmt: skip
USAGE = {
    "input_tokens": 11, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 18,
}  # fmt: skip


def events(*items: Wire, text: str = "", finished: bool = True) -> Chunks:
    """A stream of these output items, and of a message with `text`."""
    found: list[dict[str, Any]] = [{"type": "response.created", "response": response("in_progress", [])}]
    for at, item in enumerate(items):
        found.append({"type": "response.output_item.added", "output_index": at, "item": item})
        found.append({"type": "response.output_item.done", "output_index": at, "item": item})
    output: list[Wire] = list(items)
    if text:
        at = len(items)
        place = {"item_id": "msg_1", "output_index": at, "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": []}
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": []}
        found.append({"type": "response.output_item.added", "output_index": at, "item": message})
        found.append({"type": "response.content_part.added", **place, "part": part})
        found += [
            {"type": "response.output_text.delta", **place, "delta": each, "logprobs": []} for each in text.split("|")
        ]
        output.append({**message, "content": [{**part, "text": text.replace("|", "")}]})
        found.append({"type": "response.output_item.done", "output_index": at, "item": output[-1]})
    if finished:
        found.append({"type": "response.completed", "response": response("completed", output, usage=USAGE)})
    return Chunks([{**event, "sequence_number": number} for number, event in enumerate(found)], done=False)


@pytest.fixture
def server() -> Iterator[ResponsesServer]:
    with ResponsesServer() as running:
        yield running


@pytest.fixture
def model(server: ResponsesServer) -> Iterator[AdaptedModel]:
    endpoint = Endpoint("openai-responses", server.base_url, "key")
    made = adapted_model("openai-responses:gpt-5", Settings(), SystemClock(), "PERDURE_MODEL", endpoint)
    yield made
    made.close()


def test_a_turn_with_encrypted_reasoning(model: AdaptedModel, server: ResponsesServer) -> None:
    """The reasoning comes back beside its call, and is nowhere in the text."""
    server.script(events(REASONING, CALL), events(text="It is| 89."))
    reply = ask(model, QUESTION)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("calculator", CALL["arguments"])]
    assert (reply.stop_reason, reply.usage) == ("tool_calls", Usage(11, 7, 5, 3))
    said: list[str] = []
    answer = ask(
        model,
        QUESTION,
        Message(Role.ASSISTANT, reply.content, reply.tool_calls, opaque=reply.opaque),
        Message(Role.TOOL, "89", tool_call_id=reply.tool_calls[0].id),
        call=ModelCall(SystemClock(), 30.0, said.append),
    )
    assert (said, answer.content, answer.stop_reason) == (["It is", " 89."], "It is 89.", "stop")
    sent = server.requests[1]["input"]
    assert [item.get("encrypted_content") for item in sent if item.get("type") == "reasoning"] == [
        "secret-of-the-vendor"
    ]
    assert server.requests[1]["stream"] is True


def test_a_stream_without_an_end_is_no_reply(model: AdaptedModel, server: ResponsesServer) -> None:
    server.script(events(text="half", finished=False))
    with pytest.raises(InvalidResponse):
        ask(model, STATEMENT)
