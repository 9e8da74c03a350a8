"""An agent's output reaches every kind of server, and comes back as the text of the reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.models.adapted.model import AdaptedModel, adapted_model
from perdure.models.endpoints import ANTHROPIC
from perdure.models.protocol import Message, ModelCall, ModelRequest, Role, ToolCall, ToolSchema
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import QUESTION, new_call
from tests.models.anthropic_server import AnthropicServer
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, OpenAIServer, Status
from tests.models.server import ProviderServer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ANSWER = '{"city": "Paris", "days": 2}'
LOOK_UP = ToolSchema("look_up", "Look something up.", {"type": "object", "properties": {}})
DIRECT = ModelRequest((QUESTION,), output=SCHEMA, requires_output=True)
WITH_TOOLS = ModelRequest((QUESTION,), (LOOK_UP,), output=SCHEMA, requires_output=True)

Served = tuple[ProviderServer, EndpointModel | AdaptedModel]


@pytest.fixture(params=["chat", "messages", "adapted"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server, and a model of it: of both protocols of perdure, and through pydantic-ai."""
    server = AnthropicServer() if request.param == "messages" else OpenAIServer()
    with server:
        if request.param == "adapted":
            there = Endpoint("openai-chat", server.base_url, "sk-of-the-tests")
            model: Any = adapted_model("openai-chat:m", SystemClock(), "PERDURE_MODEL", there)
        else:
            model = model_of(server, kind=ANTHROPIC) if request.param == "messages" else model_of(server)
        yield server, model
        model.close() if isinstance(model, EndpointModel) else model._close()


def _offered(body: dict[str, Any]) -> dict[str, Any]:
    """The schemas of a request's tools, by name."""
    tools = [each.get("function", each) for each in body.get("tools", ())]
    return {each["name"]: each.get("parameters", each.get("input_schema")) for each in tools}


def test_a_schema_is_enforced_where_no_tool_is_offered(served: Served) -> None:
    """The server's own option has the schema, and no tool is sent."""
    server, model = served
    server.script(Answer(ANSWER))
    assert model.respond(DIRECT, new_call()).content == ANSWER
    body = server.requests[0]
    assert "tools" not in body
    assert "response_format" in body or "output_config" in body


def test_next_to_tools_the_output_is_a_tool(served: Served) -> None:
    """Few servers enforce a schema and offer tools at once. A call is required, and is no call for the caller."""
    server, model = served
    server.script(Answer("Let me see.", calls=(Call("final_answer", ANSWER, "c1"),)))
    streamed: list[str] = []
    call = ModelCall(SystemClock(), 30.0, streamed.append, streamed.clear)
    reply = model.respond(WITH_TOOLS, call)
    assert (json.loads(reply.content), reply.tool_calls, reply.stop_reason) == (json.loads(ANSWER), (), "stop")
    assert "".join(streamed) == reply.content
    body = server.requests[0]
    assert _offered(body).keys() == {"look_up", "final_answer"}
    assert _offered(body)["final_answer"] == SCHEMA
    assert body["tool_choice"] in ("required", {"type": "any"})
    assert not body.keys() & {"response_format", "output_config"}


def test_other_calls_of_the_reply_come_first(served: Served) -> None:
    """An answer that the model gives before it has the results that it asks for is none."""
    server, model = served
    server.script(Answer("", calls=(Call("look_up", "{}", "c1"), Call("final_answer", ANSWER, "c2"))))
    reply = model.respond(WITH_TOOLS, new_call())
    assert [each.name for each in reply.tool_calls] == ["look_up"]


def test_after_a_call_of_a_tool_the_answer_follows(served: Served) -> None:
    """The transcript of a turn with calls is accepted with the additional tool."""
    server, model = served
    called = Message(Role.ASSISTANT, "", (ToolCall("c1", "look_up", "{}"),))
    messages = (QUESTION, called, Message(Role.TOOL, "found", tool_call_id="c1"))
    server.script(Answer("", calls=(Call("final_answer", ANSWER, "c2"),)))
    request = ModelRequest(messages, (LOOK_UP,), output=SCHEMA, requires_output=True)
    assert json.loads(model.respond(request, new_call()).content) == json.loads(ANSWER)


@pytest.mark.parametrize("kind", ["chat", "messages"])
def test_a_refused_schema_becomes_a_tool(kind: str) -> None:
    """A server that has no option for a schema is asked once more, and from then on gets the tool at once."""
    is_chat = kind == "chat"
    option = "response_format" if is_chat else "output_config"
    with OpenAIServer() if is_chat else AnthropicServer() as server:
        model = model_of(server) if is_chat else model_of(server, kind=ANTHROPIC)
        answer = Answer("", calls=(Call("final_answer", ANSWER, "c1"),))
        server.script(Status(400, message=f"{option}: Extra inputs are not permitted"), answer, answer)
        for _ in range(2):
            assert json.loads(model.respond(DIRECT, new_call()).content) == json.loads(ANSWER)
        assert [option in each for each in server.requests] == [True, False, False]
        assert [*map(list, map(_offered, server.requests))] == [[], ["final_answer"], ["final_answer"]]
        model.close()


def test_a_model_that_thinks_is_not_made_to_call() -> None:
    """Anthropic refuses to require a call of a model that thinks. An answer as text is read like any other."""
    with AnthropicServer(Answer(ANSWER)) as server:
        model = model_of(server, kind=ANTHROPIC)
        request = ModelRequest((QUESTION,), (LOOK_UP,), {"thinking": True}, SCHEMA, requires_output=True)
        assert model.respond(request, new_call()).content == ANSWER
        assert "tool_choice" not in server.requests[0]
        model.close()


def test_limits_of_values_are_described_to_anthropic() -> None:
    """Its servers refuse `minimum` and the like in the schema of a reply."""
    with AnthropicServer(Answer(ANSWER)) as server:
        model = model_of(server, kind=ANTHROPIC)
        model.respond(DIRECT, new_call())
        sent = server.requests[0]["output_config"]["format"]["schema"]
        assert sent["properties"]["days"] == {"type": "integer", "description": "(minimum: 1)"}
        model.close()
