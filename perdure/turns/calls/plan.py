"""Planning a reply's tool calls: matching them with the agent's tools and validating their arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic_core import PydanticSerializationError, to_json

from perdure.agents import Agent
from perdure.errors import ToolError
from perdure.ids import new_id
from perdure.models.protocol import ToolCall
from perdure.runtime import Runtime
from perdure.tools.awaited.declared import DeclaredTool
from perdure.tools.awaited.timer import SleepUntil
from perdure.tools.registry import STAFF, Tool
from perdure.tools.sources import RunnableTool, Toolset
from perdure.turns.additions import Additions
from perdure.turns.lease.tenure import TurnScope

MAX_CALLS = 32
"""At most this number of calls run for one reply. Further calls are refused."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One call of a reply: ready to run, or refused with a reason for the model.

    `approver` is `user` or `staff` if the call needs approval. `repeated` tells that an earlier attempt has begun and
    its outcome is unknown.
    """

    position: int
    call: ToolCall
    effect_id: UUID
    tool: RunnableTool | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 0
    approver: str | None = None
    refusal: str | None = None
    repeated: bool = False

    @property
    def needs_approval(self) -> bool:
        return self.approver is not None

    @property
    def waits_for(self) -> str | None:
        """What the turn waits for without a worker; see `RunnableTool.waits_for`."""
        return None if self.tool is None else self.tool.waits_for

    @property
    def runnable(self) -> RunnableTool:
        """The call's tool.

        Raises:
            ValueError: the call was refused.
        """
        if self.tool is None:
            raise ValueError(f"the call of {self.call.name} was refused: it cannot run")
        return self.tool

    def intent(self) -> dict[str, Any]:
        """The row that is committed before the call begins."""
        return self._row("intended", self.timeout_s)

    def request(self, expires_s: float) -> dict[str, Any]:
        """The row of a call that waits for a person's decision about itself or about another call of the reply."""
        return self._row("asked" if self.needs_approval else "approved", expires_s)

    def _row(self, status: str, within_s: float) -> dict[str, Any]:
        return {
            "effect_id": self.effect_id,
            "position": self.position,
            "tool": self.runnable.name,
            "arguments": self.call.arguments,
            "effect": self.runnable.effect,
            "status": status,
            "timeout_s": within_s,
            "waits_for": self.waits_for,
            "approver": self.approver,
        }


def equip(runtime: Runtime, scope: TurnScope, agent: Agent, additions: Additions) -> Toolset:
    """The tools for the next step: the agent's, and those that the turn's client runs.

    Connects the agent's MCP servers concurrently, and waits for them.
    """
    if agent.servers:
        scope.step_within(max(server.connect_timeout_s for server in agent.servers))
    tools = agent.toolset(runtime.connections)
    tools.add(additions.tools)
    return tools


def plan(tools: Toolset, calls: Sequence[ToolCall], runtime: Runtime) -> list[Planned]:
    """Match a reply's calls with the tools and parse their arguments; a call that cannot run gets a refusal."""
    return [_planned(tools, position, call, runtime) for position, call in enumerate(calls)]


def _planned(tools: Toolset, position: int, call: ToolCall, runtime: Runtime) -> Planned:
    effect_id = new_id(runtime.clock)
    tool = tools.find(call.name)
    if tool is None:
        known = ", ".join(tools.names) or "none"
        return Planned(position, call, effect_id, refusal=f"There is no tool {call.name!r}. Available: {known}.")
    if position >= MAX_CALLS:
        refusal = f"Not run: at most {MAX_CALLS} calls are run for one reply. Ask again for fewer at once."
        return Planned(position, call, effect_id, refusal=refusal)
    try:
        arguments = tool.parse(call.arguments)
        timeout_s = _time_limit(tool, arguments, runtime)
    except ToolError as error:
        return Planned(position, call, effect_id, refusal=error.message)
    approver = tool.approver_of(arguments) if tool.needs_approval(arguments) else None
    if isinstance(tool, DeclaredTool) and tool.has_odd_keys:  # its own keys are for whoever runs the call
        call = replace(call, arguments=json.dumps(arguments, ensure_ascii=False))
    return Planned(position, call, effect_id, tool, arguments, timeout_s, approver)


def with_arguments(planned: Planned, arguments: Mapping[str, Any], runtime: Runtime) -> Planned:
    """The call with the arguments that hooks have changed; `planned` itself if they are the same.

    A value of `planned.arguments` among them stays what the model wrote for it: its conversion is not repeated.

    Raises:
        ToolError: they do not fit the tool, or need an approval that the call did not need: any, or that of staff in
            place of the user's.
    """
    if arguments is planned.arguments:
        return planned
    tool = planned.runnable
    try:
        text = to_json(_written(planned, arguments)).decode()
    except (PydanticSerializationError, ValueError) as error:
        raise ToolError(f"A hook changed the arguments of {tool.name} to values without a JSON form.") from error
    parsed = tool.parse(text)
    if tool.needs_approval(parsed):
        if not tool.needs_approval(planned.arguments):
            raise ToolError(f"A hook changed the arguments of {tool.name} to some that need an approval.")
        if tool.approver_of(parsed) == STAFF != tool.approver_of(planned.arguments):
            raise needs_staff(tool.name)
    timeout_s = planned.timeout_s
    if isinstance(tool, SleepUntil):
        timeout_s = _time_limit(tool, parsed, runtime)
    return replace(planned, call=replace(planned.call, arguments=text), arguments=parsed, timeout_s=timeout_s)


def _written(planned: Planned, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The changed arguments, each as the model wrote it unless it has changed, without defaults that are the same."""
    before, tool = planned.arguments, planned.runnable
    given = tool.load(planned.call.arguments) if isinstance(tool, Tool) else before
    same = {name for name, value in arguments.items() if name in before and before[name] is value}
    return {
        name: given[name] if name in same else value
        for name, value in arguments.items()
        if name not in same or name in given
    }


def needs_staff(tool: str) -> ToolError:
    return ToolError(f"A hook changed the arguments of {tool} to some that need the approval of staff.")


def _time_limit(tool: RunnableTool, arguments: dict[str, Any], runtime: Runtime) -> float:
    """The call's time limit in seconds. For a timer, the seconds until the timer's time.

    A call that a client runs, and a question to the user, have the time limit of an approval, unless the tool declares
    another.

    Raises:
        ToolError: the timer's time is invalid.
    """
    if isinstance(tool, SleepUntil):
        return tool.wait_s(arguments, runtime.clock.now(), ZoneInfo(runtime.settings.timezone))
    if tool.timeout_s is not None:
        return tool.timeout_s
    settings = runtime.settings
    return settings.approval.expires_s if tool.waits_for in {"client", "user"} else settings.turn.tool_timeout_s
