"""The interface of tools that a turn may call, and the set of tools for one prompt.

`registry.Tool` is a function in this process. `mcp.tool.RemoteTool` is a tool of an MCP server. `awaited` has the tools
that make a turn wait. The tools of an MCP server may change, so each prompt has its own `Toolset`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from perdure.models.protocol import ToolSchema
from perdure.tools import search
from perdure.tools.registry import Effect, Probe, ToolContext


class RunnableTool(Protocol):
    """A tool that a model may call. `registry.Tool` explains the attributes."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        ...

    @property
    def effect(self) -> Effect:
        """Whether a call may be repeated if its outcome is unknown."""
        ...

    @property
    def timeout_s(self) -> float | None:
        """Seconds for one call. If it is None, `PERDURE_TURN__TOOL_TIMEOUT_S` applies."""
        ...

    @property
    def probe(self) -> Probe | None:
        """Determines whether a call with an unknown outcome took effect; None if the tool has no probe."""
        ...

    @property
    def breaker(self) -> str | None:
        """The NAME of the breaker `tool:NAME` through which the engine calls the tool.

        None if the tool has no breaker, or passes its calls through a breaker by itself.
        """
        ...

    @property
    def waits_for(self) -> str | None:
        """What the turn waits for without a worker: `task`, `timer`, `client` or `user`; None: a worker runs it."""
        ...

    @property
    def max_result_chars(self) -> int:
        """The most characters of a result in the transcript."""
        ...

    def schema(self) -> ToolSchema:
        """The tool's name, description and parameters, as they are sent to the model."""
        ...

    def parse(self, arguments: str) -> dict[str, Any]:
        """Parse and check the arguments that a model wrote.

        Raises:
            ToolError: the arguments are invalid; the message is for the model.
        """
        ...

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with `arguments`, as `parse` returns them, needs a person's approval."""
        ...

    def approver_of(self, arguments: Mapping[str, Any]) -> str:
        """Who approves a call with `arguments`, as `parse` returns them: `user` or `staff`."""
        ...

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Run the tool with arguments from `parse`.

        Raises:
            ToolError: the tool failed; the message is for the model.
            OutcomeUnknown: the call was interrupted, and may or may not have taken effect.
        """
        ...


class Toolset:
    """The tools of one prompt, by name. If two tools have the same name, the first tool is used."""

    def __init__(self, tools: Iterable[RunnableTool] = ()) -> None:
        self._by_name: dict[str, RunnableTool] = {}
        self.add(tools)

    def add(self, tools: Iterable[RunnableTool]) -> None:
        """Add tools. Those that the set has already keep their names."""
        for each in tools:
            self._by_name.setdefault(each.name, each)

    @property
    def search(self) -> RunnableTool | None:
        """The built-in tool that finds tools that are not in the prompt; `None` if another tool has its name.

        It is in neither `names` nor `schemas`.
        """
        return None if search.NAME in self._by_name else search.over(self.schemas)

    def find(self, name: str) -> RunnableTool | None:
        return self.search if name == search.NAME and name not in self._by_name else self._by_name.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(each.schema() for each in self._by_name.values())
