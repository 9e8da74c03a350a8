"""One tool of an MCP server, as the engine calls it; and which of a server's tools are usable_tools to be one."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, ClassVar

from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ToolAnnotations
from mcp_types import Tool as Listed

from perdure.errors import Abandoned, CircuitBreakerOpen, OutcomeUnknown, ToolError
from perdure.models.protocol import ToolSchema
from perdure.models.providers.names import MAX_NAME
from perdure.text import untrusted
from perdure.text.patterns import compiled
from perdure.tools.mcp.faults import MalformedAnswer, NoAnswer, NotConnected
from perdure.tools.mcp.results import render
from perdure.tools.mcp.server import McpServer
from perdure.tools.registry import Approval, Effect, Probe, ToolContext, must_be_approved

log = logging.getLogger(__name__)

CallTool = Callable[[str, Mapping[str, Any], ToolContext], CallToolResult]
"""Sends a call, by the server's name for the tool, and waits for its answer; see `ServerConnection.call_tool`."""

_NAME = compiled(r"[a-zA-Z0-9_./-]+")
_MAX_DESCRIPTION = 4_000
_MAX_SCHEMA = 32_000
"""Characters, of which every prompt pays for each."""


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTool:
    """A tool that a server offers; see `sources.RunnableTool`. The breaker is the server's, and stands in its connection."""

    breaker: ClassVar[None] = None

    name: str
    description: str
    parameters: Mapping[str, Any]
    effect: Effect
    timeout_s: float | None
    probe: Probe | None
    max_result_chars: int
    requires_approval: Approval
    _server: str
    _remote: str
    _call_tool: CallTool

    def schema(self) -> ToolSchema:
        """The tool as a model sees it."""
        return ToolSchema(self.name, self.description, self.parameters)

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check that what a model wrote is a strict JSON object.

        Whether it fits the schema is the server's to say: a stranger's schema may hold
        patterns that take a day to match.

        Raises:
            ToolError: it is none; the message says what is wrong.
        """
        try:
            return untrusted.load_object(arguments)
        except (ValueError, OverflowError) as error:
            raise ToolError(f"The arguments of {self.name} were refused: {untrusted.storable(str(error))}.") from None

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a person must approve of a call with `arguments`, which are unchecked: see `parse`."""
        return must_be_approved(self.name, self.requires_approval, arguments)

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """CallTool the server, and render what it answers.

        Raises:
            ToolError: it failed, or could not be asked; the message is for the model.
            OutcomeUnknown: it was asked, and there is no answer.
        """
        try:
            result = self._call_tool(self._remote, arguments, context)
        except CircuitBreakerOpen as error:
            raise ToolError(f"Not called: the server {self._server} failed too often of late.{_in(error)}") from error
        except NotConnected as error:
            raise ToolError(f"Not called: the server {self._server} cannot be reached at present.") from error
        except MalformedAnswer as error:
            text = f"{self.name} was called, and what the server answered cannot be read: {error}."
            raise ToolError(text) from error
        except MCPError as error:
            raise ToolError(untrusted.first_line(f"The server {self._server} refused the call: {error}")) from error
        except (NoAnswer, TimeoutError, Abandoned, CancelledError) as error:
            text = f"{self.name} was called, and there is no answer ({untrusted.first_line(str(error)) or 'ended'})."
            raise OutcomeUnknown(text) from error
        text = render(result, self.max_result_chars)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed and does not say why.")
        return text


def usable_tools(server: McpServer, listed: Iterable[Listed], call_tool: CallTool) -> tuple[RemoteTool, ...]:
    """The tools of those that `server` lists that can be offered to a model; of the others the log tells."""
    made: dict[str, RemoteTool] = {}
    for each in listed:
        why = "of its name there is one already" if each.name in made else _unfit(server, each)
        if why is None:
            made[each.name] = _remote_tool(server, each, call_tool)
        else:
            log.warning("the tool %r of MCP server %s is left out: %s", each.name[:100], server.name, why)
    for name in sorted(server.configured_tools - made.keys()):
        log.warning("MCP server %s has no tool %r, of which its declaration speaks", server.name, name)
    return tuple(made.values())


def _remote_tool(server: McpServer, listed: Listed, call_tool: CallTool) -> RemoteTool:
    said = listed.description or listed.title or listed.name
    return RemoteTool(
        name=f"{server.name}:{listed.name}",
        description=untrusted.cut(untrusted.storable(said), _MAX_DESCRIPTION),
        parameters=listed.input_schema,
        effect=server.effect_of(listed.name, _effect_hint(listed.annotations)),
        timeout_s=server.timeout_s,
        probe=server.probes.get(listed.name),
        max_result_chars=server.max_result_chars,
        requires_approval=server.approval_of(listed.name),
        _server=server.name,
        _remote=listed.name,
        _call_tool=call_tool,
    )


def _unfit(server: McpServer, listed: Listed) -> str | None:
    return next(_problems(server, listed), None)


def _problems(server: McpServer, listed: Listed) -> Iterator[str]:
    """Why a tool cannot be offered: no name, or no schema, that every provider takes."""
    if not _NAME.fullmatch(listed.name):
        yield "its name has other characters than a-z, A-Z, 0-9 and _ . / -"
    if len(server.name) + 1 + len(listed.name) > MAX_NAME:
        yield f"with the server's its name is longer than {MAX_NAME} characters"
    if listed.input_schema.get("type") != "object":
        yield "its schema is not of type object"
    try:
        text = json.dumps(listed.input_schema)
        untrusted.load_object(text)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        yield f"its schema is unfit: {untrusted.first_line(str(error))}"
    else:
        if len(text) > _MAX_SCHEMA:
            yield f"its schema is longer than {_MAX_SCHEMA:,} characters"


def _effect_hint(said: ToolAnnotations | None) -> Effect | None:
    if said is None:
        return None
    if said.read_only_hint:
        return Effect.PURE
    return Effect.IDEMPOTENT if said.idempotent_hint else None


def _in(error: CircuitBreakerOpen) -> str:
    return "" if error.retry_after_s is None else f" Try again in {math.ceil(error.retry_after_s)} s."
