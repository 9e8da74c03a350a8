"""Models of OpenAI's Responses API, whose reasoning is encrypted and comes back with the next prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import SystemClock
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.protocol import Message, ModelCall, ModelRequest, Role, Usage
from perdure.models.providers.endpoint import Endpoint
from perdure.testing.suites.models import QUESTION, STATEMENT, ask, new_call
from tests.models.responses_server import REASONING, ResponsesServer
from tests.models.server import Answer, Call, Status

CALL = Call("calculator", '{"expression": "12*7+5"}')


@pytest.fixture
def server() -> Iterator[ResponsesServer]:
    with ResponsesServer() as running:
        yield running


@pytest.fixture
def model(server: ResponsesServer) -> Iterator[AdaptedModel]:
    endpoint = Endpoint("openai-responses", server.base_url, "key")
    made = adapted_model("openai-responses:gpt-5", SystemClock(), "PERDURE_MODEL", endpoint)
    yield made
    made.close()


def test_a_turn_with_encrypted_reasoning(model: AdaptedModel, server: ResponsesServer) -> None:
    """The reasoning comes back beside its call, and is nowhere in the text."""
    server.thinks = True
    server.script(Answer(calls=[CALL]), Answer("It is 89.", piece=5))
    reply = ask(model, QUESTION)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("calculator", CALL.arguments)]
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
    secret = REASONING["encrypted_content"]
    assert [item.get("encrypted_content") for item in sent if item.get("type") == "reasoning"] == [secret]
    assert server.requests[1]["stream"] is True


def test_an_option_may_be_refused(model: AdaptedModel, server: ResponsesServer) -> None:
    """Servers of this API other than OpenAI's do not have all of its options."""
    server.script(Status(400, message="Unknown parameter: 'service_tier'."), Answer("Yes."), Answer("Yes."))
    for _ in range(2):
        request = ModelRequest((STATEMENT,), settings={"max_tokens": 99, "service_tier": "flex"})
        assert model.respond(request, new_call()).content == "Yes."
    assert ["service_tier" in each for each in server.requests] == [True, False, False]
    assert server.requests[2]["max_output_tokens"] == 99
