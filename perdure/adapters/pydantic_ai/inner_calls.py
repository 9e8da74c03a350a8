"""The calls of tools by agents that a tool runs (delegation): each has an effect id of its own.

Such an agent is no part of a turn: pydantic-ai runs it within the outer call, and runs it again if the outer call is
repeated. The id of an inner call is made of the outer call's id, and of what the model asked for, so it is the same in
each repetition. pydantic-ai has no hook for the calls of all agents of a process, so this module wraps the two public
methods of `ToolManager` that execute calls. Outside a call of an adapted agent they do what they did.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from pydantic_ai.messages import ToolCallPart
from pydantic_ai.tool_manager import ToolManager, ValidatedToolCall
from pydantic_core import to_json

from perdure.adapters.pydantic_ai.effects import running
from perdure.text.untrusted import load_object

_EXECUTING = ("execute_tool_call", "execute_output_tool_call")


def install() -> None:
    """Give the inner calls of this process their ids."""
    for name in _EXECUTING:
        executing = getattr(ToolManager, name)
        if not hasattr(executing, "__wrapped__"):
            setattr(ToolManager, name, _numbered(executing))


def _numbered(execute: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(execute)
    async def executed(manager: Any, validated: ValidatedToolCall[Any], *given: Any, **named: Any) -> Any:
        outer = running.get()
        if outer is None or not validated.args_valid:
            return await execute(manager, validated, *given, **named)
        agent = validated.ctx.agent
        token = running.set(outer.inner(_asked(None if agent is None else agent.name, validated.call)))
        try:
            return await execute(manager, validated, *given, **named)
        finally:
            running.reset(token)

    return executed


def _asked(agent: str | None, call: ToolCallPart) -> str:
    """What the model of an agent asked for. The same arguments may be other JSON in a repetition."""
    given = call.args or {}
    text = given if isinstance(given, str) else to_json(given, serialize_unknown=True).decode()
    try:
        arguments: object = load_object(text, any_text=True)
    except ValueError:
        arguments = text
    return json.dumps([agent, call.tool_name, arguments], sort_keys=True)
