"""Tools that pass work to another agent: `AgentTool` asks it, `HandoffTool` leaves the conversation to it.

The engine opens a session for each call of an `AgentTool`, whose turn answers the call (`turns.calls.children`). The
call of a `HandoffTool` takes effect with the commit of its round (`turns.run.loop`). `perdure.adapters.delegating`
makes these tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from perdure.errors import ToolError
from perdure.tools.awaited.declared import DeclaredTool
from perdure.tools.registry import Effect, ToolContext

TASK: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "task": {
            "type": "string",
            "description": "What the agent shall do, with all that it must know: it does not see this conversation.",
        }
    },
    "required": ["task"],
    "additionalProperties": False,
}

NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, eq=False)
class AgentTool(DeclaredTool):
    """Another agent as a tool; see `sources.RunnableTool`. Made by `agent_tool`.

    `agent` is the agent named `agent_name`, or `None` if only the name was given. A call without an answer after
    `timeout_s` seconds has an unknown outcome, and the agent's turn is cancelled.
    """

    waits_for: ClassVar[str] = "agent"
    effect: ClassVar[Effect] = Effect.IDEMPOTENT
    """The agent is asked once for each effect id, however often the call is begun."""

    agent_name: str
    agent: Any
    timeout_s: float

    def parse(self, arguments: str) -> dict[str, Any]:
        """As `DeclaredTool.parse`. The task must be text."""
        given = self._load(arguments)
        self._check(given)
        if not isinstance(given["task"], str) or not given["task"].strip():
            raise self._refusal("task is no text, or empty")
        return given

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> NoReturn:  # noqa: ARG002 (as RunnableTool)
        """Raise `ToolError`: the engine asks the agent and never calls this method."""
        raise ToolError(f"{self.name} is an agent, which answers in a session of its own.")


@dataclass(frozen=True, slots=True, eq=False)
class HandoffTool(DeclaredTool):
    """A tool whose call makes another agent the conversation's; see `sources.RunnableTool`. Made by `handoff`.

    `agent` is the agent named `agent_name`, or `None` if only the name was given.
    """

    waits_for: ClassVar[None] = None
    timeout_s: ClassVar[None] = None
    effect: ClassVar[Effect] = Effect.PURE

    agent_name: str
    agent: Any

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:  # noqa: ARG002 (as RunnableTool)
        """The result that both agents read. The commit of the round hands the conversation over."""
        return f"From here on, the agent {self.agent_name!r} answers."
