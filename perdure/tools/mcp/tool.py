"""Makes a `RunnableTool` from each tool that an MCP server lists, if the tool can be offered to a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ListToolsResult, ToolAnnotations
from mcp_types import Tool as Listed
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

from perdure.errors import Abandoned, CircuitBreakerOpen, OutcomeUnknown, ToolError
from perdure.models.protocol import ToolSchema
from perdure.models.providers.wire_names import MAX_NAME, WireKeys
from perdure.text import untrusted
from perdure.text.patterns import compiled
from perdure.tools.guarded import again_in
from perdure.tools.mcp.faults import MalformedAnswer, NoAnswer, NotConnected
from perdure.tools.mcp.results import render
from perdure.tools.mcp.server import McpServer
from perdure.tools.registry import (
    Approvable,
    Approval,
    Approver,
    Effect,
    Probe,
    ToolContext,
    load_arguments,
)

log = logging.getLogger(__name__)

CallTool = Callable[[str, Mapping[str, Any], ToolContext], CallToolResult]
"""Calls a tool by its name without the prefix `server:`, and returns the answer; see `ServerConnection.call_tool`."""

_NAME = compiled(r"[a-zA-Z0-9_./-]+")
_REST = {"resultType": "complete", "ttlMs": 0, "cacheScope": "public"}  # what the protocols require of a list
_MAX_DESCRIPTION = 4_000
_MAX_SCHEMA = 32_000
"""The most characters of a tool's schema. Every prompt contains the schema, which costs tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTool(Approvable):
    """A tool of an MCP server; see `sources.RunnableTool`.

    `parameters` is the server's schema, with keys that providers accept. `breaker` is None, because `ServerConnection`
    passes each call through the server's breaker.
    """

    breaker: ClassVar[None] = None
    waits_for: ClassVar[None] = None

    name: str
    description: str
    parameters: Mapping[str, Any]
    effect: Effect
    timeout_s: float | None
    probe: Probe | None
    max_result_chars: int
    requires_approval: Approval
    approver: Approver
    _keys: WireKeys
    _server: str
    _remote: str
    _call_tool: CallTool
    _schema: ToolSchema = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_schema", ToolSchema(self.name, self.description, self.parameters))

    def schema(self) -> ToolSchema:
        return self._schema

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check that the arguments are a strict JSON object, and return them with the server's keys.

        Only the server checks the arguments against the tool's schema. perdure does not, because the schema is
        untrusted: matching its regular expressions may take days.

        Raises:
            ToolError: the arguments are anything else; the message is for the model.
        """
        try:
            return self._keys.from_wire(load_arguments(arguments, self.parameters))
        except (ValueError, OverflowError) as error:
            raise ToolError(f"The arguments of {self.name} were refused: {untrusted.storable(str(error))}.") from None

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Call the tool on the server, and render its answer.

        Raises:
            ToolError: the call failed, or was not sent; the message is for the model.
            OutcomeUnknown: the call was sent, and no answer arrived.
        """
        try:
            result = self._call_tool(self._remote, arguments, context)
        except CircuitBreakerOpen as error:
            raise ToolError(
                f"Not called: the server {self._server} failed too often recently.{again_in(error)}"
            ) from error
        except NotConnected as error:
            raise ToolError(f"Not called: the server {self._server} cannot be reached at present.") from error
        except MalformedAnswer as error:
            text = f"{self.name} was called, but the server's answer cannot be read: {error}."
            raise ToolError(text) from error
        except MCPError as error:
            raise ToolError(untrusted.first_line(f"The server {self._server} refused the call: {error}")) from error
        except (NoAnswer, TimeoutError, Abandoned, CancelledError) as error:
            text = f"{self.name} was called, but there is no answer ({untrusted.first_line(str(error)) or 'ended'})."
            raise OutcomeUnknown(text) from error
        text = render(result, self.max_result_chars, context.attach)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed without a message.")
        return text


def usable_tools(server: McpServer, listed: Iterable[Listed], call_tool: CallTool) -> tuple[RemoteTool, ...]:
    """The tools in `listed` that can be offered to a model. For each other tool, logs the reason."""
    made: dict[str, RemoteTool] = {}
    for each in listed:
        why = "another tool has the same name" if each.name in made else _unfit(server, each)
        if why is None:
            made[each.name] = _remote_tool(server, each, call_tool)
        else:
            log.warning("the tool %r of MCP server %s is not offered to models: %s", each.name[:100], server.name, why)
    for name in sorted(server.configured_tools - made.keys()):
        log.warning("MCP server %s has no tool %r, which its declaration names", server.name, name)
    return tuple(made.values())


def without_malformed(listing: dict[str, Any], version: str, most: int) -> tuple[dict[str, Any], list[str]]:
    """A list of tools, as it came, without those that the protocol's `version` does not allow, and what is wrong.

    If a tool is malformed, the list has at most `most` tools. Any other fault of the list is left to the SDK.
    """
    if _error(listing, version) is None:
        return listing, []
    fit: list[Any] = []
    faults: list[str] = []
    for each in listing["tools"][:most]:
        error = _error({"tools": [each], **_REST}, version)
        if error is None:
            fit.append(each)
        else:
            faults.append(_fault(each, error))
    return {**listing, "tools": fit}, faults


def _error(listing: dict[str, Any], version: str) -> ValidationError | None:
    try:
        validate_server_result("tools/list", version, listing)
        ListToolsResult.model_validate(listing, by_name=False)
    except ValidationError as error:
        return error
    return None


def _fault(tool: object, error: ValidationError) -> str:
    """The name of a malformed tool, and the first place at which it is malformed."""
    name = str(tool.get("name"))[:100] if isinstance(tool, dict) else None
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in found["loc"][2:])  # after `tools` and the index
    return untrusted.first_line(f"the declaration of {name!r} is malformed ({where}: {found['msg']})")


def _remote_tool(server: McpServer, listed: Listed, call_tool: CallTool) -> RemoteTool:
    description = listed.description or listed.title or listed.name
    keys = WireKeys(listed.input_schema)
    return RemoteTool(
        name=f"{server.name}:{listed.name}",
        description=untrusted.cut(untrusted.storable(description), _MAX_DESCRIPTION),
        parameters=keys.schema,
        effect=server.effect_of(listed.name, _effect_hint(listed.annotations)),
        timeout_s=server.timeout_s,
        probe=server.probes.get(listed.name),
        max_result_chars=server.max_result_chars,
        requires_approval=server.approval_of(listed.name),
        approver=server.approver_of(listed.name),
        _keys=keys,
        _server=server.name,
        _remote=listed.name,
        _call_tool=call_tool,
    )


def _unfit(server: McpServer, listed: Listed) -> str | None:
    return next(_problems(server, listed), None)


def _problems(server: McpServer, listed: Listed) -> Iterator[str]:
    """The reasons why a tool cannot be offered: some provider would reject its name or schema."""
    if not _NAME.fullmatch(listed.name):
        yield "its name has characters other than a-z, A-Z, 0-9 and _ . / -"
    if len(server.name) + 1 + len(listed.name) > MAX_NAME:
        yield f"with the server's name, its name is longer than {MAX_NAME} characters"
    if listed.input_schema.get("type") != "object":
        yield "its schema is not of type object"
    try:
        text = json.dumps(listed.input_schema)
        untrusted.load_object(text)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        yield f"its schema is invalid: {untrusted.first_line(str(error))}"
    else:
        if len(text) > _MAX_SCHEMA:
            yield f"its schema is longer than {_MAX_SCHEMA:,} characters"


def _effect_hint(annotations: ToolAnnotations | None) -> Effect | None:
    if annotations is None:
        return None
    if annotations.read_only_hint:
        return Effect.PURE
    return Effect.IDEMPOTENT if annotations.idempotent_hint else None
