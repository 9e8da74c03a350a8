"""What a turn needs of a tool, whatever the tool is made of.

`registry.Tool` is a function of this process, `mcp.tool.RemoteTool` a tool of a server. A
server's tools come and go, so an agent's are gathered anew for each prompt: a `Toolset`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from perdure.models.protocol import ToolSchema
from perdure.tools.registry import Effect, Probe, ToolContext


class RunnableTool(Protocol):
    """A tool that a model may call and the ledger may run; the attributes are `registry.Tool`'s."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        ...

    @property
    def effect(self) -> Effect:
        """What may be done when its outcome is in doubt."""
        ...

    @property
    def timeout_s(self) -> float | None:
        """Seconds for one call; None means the setting."""
        ...

    @property
    def probe(self) -> Probe | None:
        """Asks the outside world whether an effect in doubt took place."""
        ...

    @property
    def breaker(self) -> str | None:
        """The breaker `tool:NAME` of whoever the tool needs; None if it needs nobody, or has a breaker of its own."""
        ...

    @property
    def max_result_chars(self) -> int:
        """Characters of a result that reach the transcript."""
        ...

    def schema(self) -> ToolSchema:
        """The tool as a model sees it."""
        ...

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check what a model wrote as arguments.

        Raises:
            ToolError: they cannot be used; the message is for the model.
        """
        ...

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a person must approve of a call with what `parse` returned."""
        ...

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Run it with what `parse` returned.

        Raises:
            ToolError: it failed; the message is for the model.
            OutcomeUnknown: it was broken off, and nobody knows whether it took effect.
        """
        ...


class Toolset:
    """The tools of one prompt, by name. Of two that have one name the first stays."""

    def __init__(self, tools: Iterable[RunnableTool] = ()) -> None:
        self._by_name: dict[str, RunnableTool] = {}
        for each in tools:
            self._by_name.setdefault(each.name, each)

    def find(self, name: str) -> RunnableTool | None:
        """The tool of that name, if there is one."""
        return self._by_name.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order given."""
        return tuple(self._by_name)

    def schemas(self) -> tuple[ToolSchema, ...]:
        """The tools as a model sees them."""
        return tuple(each.schema() for each in self._by_name.values())
