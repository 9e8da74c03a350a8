"""One odd tool, such as one of an MCP server, does not make a provider refuse every prompt that offers it.

The servers refuse what reports in public trackers say that their providers refuse: ComposioHQ/composio#3500,
beautyfree/appstore-connect-mcp#2, modelcontextprotocol/servers#799, rusiaaman/wcgw#51.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from mcp_types import CallToolResult
from mcp_types import Tool as Listed

from perdure import McpServer
from perdure.clock import SystemClock
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.endpoints import ANTHROPIC, OPENAI
from perdure.models.protocol import ModelRequest
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import CONTEXT, QUESTION, new_call
from perdure.tools.mcp.tool import RemoteTool, usable_tools
from perdure.tools.registry import ToolContext
from tests.models.adapted.test_adapted_suite import BlocksServer
from tests.models.openai_server import OpenAIServer
from tests.models.responses_server import ResponsesServer
from tests.models.server import Answer, Call, ProviderServer, Status, Wire

_UNIONS = frozenset({"oneOf", "anyOf", "allOf", "enum", "not"})
_KEY = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def _problem(schema: Wire, description: str, longest: int | None) -> Status | None:
    if _UNIONS & schema.keys():
        return Status(400, message="schema must not have 'oneOf'/'anyOf'/'allOf'/'enum'/'not' at the top level")
    if longest and len(description) > longest:
        return Status(400, "string_above_max_length", f"expected a string with maximum length {longest}")
    return None


class StrictChat(OpenAIServer):
    """OpenAI's Chat Completions."""

    def judge(self, path: str, body: Wire) -> Status | None:
        functions = [each["function"] for each in body["tools"]]
        problems = [_problem(each["parameters"], each["description"], 1_024) for each in functions]
        return next(filter(None, problems), super().judge(path, body))


class StrictResponses(ResponsesServer):
    """OpenAI's Responses API."""

    def judge(self, path: str, body: Wire) -> Status | None:
        problems = [_problem(each["parameters"], each["description"], 1_024) for each in body["tools"]]
        return next(filter(None, problems), super().judge(path, body))


class StrictMessages(BlocksServer):
    """Anthropic's Messages."""

    def judge(self, path: str, body: Wire) -> Status | None:
        schemas = [each["input_schema"] for each in body["tools"]]
        if not all(_KEY.fullmatch(key) for each in schemas for key in each.get("properties", ())):
            return Status(400, message=f"Property keys should match pattern '^{_KEY.pattern}$'")
        problems = [_problem(each, "", None) for each in schemas]
        return next(filter(None, problems), super().judge(path, body))


Made = EndpointModel | AdaptedModel

_SERVERS: dict[str, tuple[str, Callable[[], ProviderServer]]] = {
    "chat": ("openai-chat", StrictChat),
    "responses": ("openai-responses", StrictResponses),
    "messages": (ANTHROPIC, StrictMessages),
}


@pytest.fixture(params=["chat", "messages", "adapted chat", "adapted responses", "adapted messages"])
def offering(request: pytest.FixtureRequest) -> Iterator[tuple[ProviderServer, Made]]:
    """A strict server, and a model of it: perdure's own, or one of pydantic-ai."""
    *adapted, wire = request.param.split()
    kind, make = _SERVERS[wire]
    with make() as server:
        url = server.base_url.removesuffix("/v1") if adapted and kind == ANTHROPIC else server.base_url
        endpoint = Endpoint("there", url, "sk-of-the-tests", kind=ANTHROPIC if kind == ANTHROPIC else OPENAI)
        model: Made = (
            adapted_model("there:test-model", SystemClock(), "PERDURE_MODEL", endpoint, kind)
            if adapted
            else EndpointModel(endpoint, "test-model", SystemClock())
        )
        yield server, model
        model.close()


def remote(schema: Wire, description: str, called: list[Mapping[str, Any]] | None = None) -> RemoteTool:
    """The tool `shop:find` of an MCP server, which adds the arguments of its calls to `called`."""

    def call_tool(name: str, arguments: Mapping[str, Any], context: ToolContext) -> CallToolResult:
        del name, context
        if called is not None:
            called.append(arguments)
        return CallToolResult(content=[])

    listed = Listed(name="find", description=description, input_schema={"type": "object", **schema})
    [made] = usable_tools(McpServer("shop", url="http://localhost/mcp"), [listed], call_tool)
    return made


def offered(server: ProviderServer) -> tuple[str, dict[str, Any]]:
    """The description and the schema of the only tool in the last request."""
    [tool] = server.requests[-1]["tools"]
    function = tool.get("function", tool)
    return function["description"], function.get("parameters") or function["input_schema"]


def test_a_union_of_arguments_is_offered_as_one_object(offering: tuple[ProviderServer, Made]) -> None:
    """The model gets the arguments of all branches, and reads which of them belong together."""
    server, model = offering
    branches = [{"properties": {name: {"type": "string"}}, "required": [name]} for name in ("id", "slug")]
    server.script(Answer("Yes."))
    tool = remote({"anyOf": branches}, "Find a page.")
    assert model.respond(ModelRequest((QUESTION,), (tool.schema(),)), new_call()).content == "Yes."
    description, schema = offered(server)
    assert description == "Find a page. Pass at least one of these sets of arguments: id; slug."
    assert set(schema["properties"]) == {"id", "slug"}
    assert not schema.get("required")


def test_keys_are_translated_for_the_model_and_back_for_the_tool(offering: tuple[ProviderServer, Made]) -> None:
    """The tool gets its own keys, at every depth. What the schema does not name stays as the model wrote it."""
    server, model = offering
    schema = {
        "properties": {
            "filter[name]": {"type": "string", "description": "A name."},
            "filter_name_": {"type": "string"},
            "page": {"type": "object", "properties": {"$top": {"type": "integer"}}, "required": ["$top"]},
            "data": {"type": "object", "additionalProperties": True},
        },
        "required": ["filter[name]"],
    }
    called = list[Mapping[str, Any]]()
    tool = remote(schema, "Find an order.", called)
    written = {"filter_name__2": "a", "filter_name_": "b", "page": {"_top": 3}, "data": {"_top": 4}}
    server.script(Answer(calls=[Call("shop_find", json.dumps(written))]))
    [call] = model.respond(ModelRequest((QUESTION,), (tool.schema(),)), new_call()).tool_calls
    tool.call(tool.parse(call.arguments), CONTEXT)
    assert called == [{"filter[name]": "a", "filter_name_": "b", "page": {"$top": 3}, "data": {"_top": 4}}]
    properties = offered(server)[1]["properties"]
    assert set(properties) == {"filter_name_", "filter_name__2", "page", "data"}
    assert properties["filter_name__2"]["description"] == "A name. (filter[name])"
    assert set(properties["page"]["properties"]) == {"_top"}


def test_a_long_description_is_cut_for_openai(offering: tuple[ProviderServer, Made]) -> None:
    """The rest is in the description of the schema, so that the model reads all of it."""
    server, model = offering
    text = "".join(f"{number:04}" for number in range(500))
    server.script(Answer("Yes."))
    tool = remote({"properties": {"q": {"type": "string"}}}, text)
    assert model.respond(ModelRequest((QUESTION,), (tool.schema(),)), new_call()).content == "Yes."
    description, schema = offered(server)
    if isinstance(server, StrictMessages):
        assert description == text
    else:
        assert len(description) == 1_024
        assert description.endswith("…")
        assert description.removesuffix("…") + schema["description"].removeprefix("…") == text
