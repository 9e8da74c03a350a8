"""What a request adds to the agent for its turn: the client's tools, settings, instructions and output.

`additions_of` makes them from the members of a request. A member that the agent or its model cannot satisfy is refused;
the error names the member.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from perdure.agents import Agent
from perdure.channels.http.auth import Caller, KeyKind
from perdure.channels.http.openai.errors import BadParameter
from perdure.channels.http.openai.wire import ChatRequest, ResponseRequest, texts_of
from perdure.errors import PerdureError, SettingsError
from perdure.models.protocol import name_of
from perdure.models.schemas import acceptable
from perdure.models.settings import check, supported_by
from perdure.runtime import Runtime
from perdure.settings import ClientInstructions
from perdure.text.untrusted import load_object
from perdure.tools.awaited.external import ExternalTool
from perdure.turns.additions import MAX_CHARS, MAX_TOOLS, Additions, client_tool

_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop": "stop_sequences",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "service_tier": "service_tier",
    "reasoning_effort": "reasoning_effort",
    "parallel_tool_calls": "parallel_tool_calls",
}
"""The members that are settings of a model's calls, with the settings' names."""

_SYSTEM = ("system", "developer")
_DEFAULT_TIERS = ("auto", "default")
_NOTHING: Mapping[str, object] = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
"""The values of settings with which a request asks for nothing. A model that does not take the setting ignores them."""


def additions_of(
    body: ChatRequest | ResponseRequest, runtime: Runtime, caller: Caller, *, takes_tools: bool = True
) -> Additions:
    """What the request adds. `takes_tools` is false for a front end whose tools the agent ignores.

    Raises:
        BadParameter: a member cannot be used.
    """
    agent = runtime.agents.get(body.model) if body.model else runtime.agents.default
    tools = _tools(body, agent) if takes_tools else ()
    additions = Additions(
        _offered(body.tool_choice, tools),
        tuple(each.name for each in tools),
        _settings(body, agent, runtime, tools if takes_tools else None),
        _instructions(body, runtime, caller),
        _output(body, agent),
        body.store is not False,
    )
    if not agent.is_own and (tools or additions.output is not None or additions.settings or additions.instructions):
        member = next(_members(additions, body))
        raise BadParameter(f"{member}: an agent of pydantic-ai takes none, and {agent.name!r} is one.", member)
    text = json.dumps(additions.to_dict() or {})
    if len(text) > MAX_CHARS:
        raise BadParameter(f"tools: are longer than {MAX_CHARS} characters.", "tools")
    try:
        load_object(text)
    except ValueError as error:
        member = next(_members(additions, body))
        raise BadParameter(f"{member}: cannot be used: {error}.", member) from None
    return additions


def _members(additions: Additions, body: ChatRequest | ResponseRequest) -> Iterator[str]:
    """The names of the members that make `additions`."""
    if additions.tools:
        yield "tools"
    if additions.output is not None:
        yield "response_format" if isinstance(body, ChatRequest) else "text.format"
    yield from (name for name in _SETTINGS if getattr(body, name, None) is not None)
    if body.tool_choice is not None:
        yield "tool_choice"
    yield "instructions"


def _tools(body: ChatRequest | ResponseRequest, agent: Agent) -> tuple[ExternalTool, ...]:
    given = body.tools or []
    if len(given) > MAX_TOOLS:
        raise BadParameter(f"tools: at most {MAX_TOOLS} are accepted.", "tools")
    found: dict[str, ExternalTool] = {}
    for position, each in enumerate(given):
        where = f"tools[{position}]"
        if not isinstance(each, Mapping) or each.get("type") != "function":
            kind = str(each.get("type"))[:40] if isinstance(each, Mapping) else "none"
            raise BadParameter(f"{where}.type: only functions are supported, not {kind!r}.", f"{where}.type")
        nested = isinstance(body, ChatRequest)
        function = each.get("function") if nested else each
        where = f"{where}.function" if nested else where
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadParameter(f"{where}.name: is missing.", f"{where}.name")
        name, description = function["name"], function.get("description")
        if name in found or (agent.is_own and agent.find_tool(name) is not None):
            owner = "the agent" if name not in found else "the request"
            raise BadParameter(f"{where}.name: {owner} has a tool {name[:64]!r} already.", f"{where}.name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise BadParameter(f"{where}.parameters: expected a JSON schema.", f"{where}.parameters")
        try:
            found[name] = client_tool(
                name, description if isinstance(description, str) else "", acceptable(parameters) if parameters else {}
            )
        except (SettingsError, RecursionError) as error:
            raise BadParameter(f"{where}: {error}", where) from None
    return tuple(found.values())


def _settings(
    body: ChatRequest | ResponseRequest, agent: Agent, runtime: Runtime, tools: tuple[ExternalTool, ...] | None
) -> dict[str, Any]:
    """The settings for the model. `tools` are the client's; `None`: they are ignored, with the settings about them."""
    found: dict[str, Any] = {}
    for member, setting in _SETTINGS.items():
        value = getattr(body, member, None)
        if value is None or (setting == "parallel_tool_calls" and tools is None):
            continue
        if member == "stop" and isinstance(value, str):
            value = [value]
        if setting == "service_tier" and value in _DEFAULT_TIERS:
            continue
        _add(found, setting, value, member)
    if isinstance(body, ResponseRequest) and (effort := (body.reasoning or {}).get("effort")) is not None:
        _add(found, "reasoning_effort", effort, "reasoning.effort")
    if body.tool_choice is not None and tools is not None:
        _add(found, "tool_choice", _choice(body.tool_choice, agent, tools), "tool_choice")
    return _supported(found, agent, runtime)


def _add(found: dict[str, Any], setting: str, value: Any, member: str) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and setting in {"temperature", "top_p"}:
        with suppress(OverflowError):  # `check` refuses it
            value = float(value)
    try:
        check({setting: value}, "the request")
    except SettingsError as error:
        accepted = str(error).rpartition("accepted: ")[2]
        raise BadParameter(f"{member}: is invalid; accepted: {accepted}.", member) from None
    found[setting] = value


def _choice(given: Any, agent: Agent, tools: tuple[ExternalTool, ...]) -> Any:
    """The setting `tool_choice` for OpenAI's member of this name."""
    if given in ("none", "auto", "required"):
        return given
    mode, names = _allowed(given)
    match given:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            names = [name]
        case _:
            pass
    known = [each.name for each in (*tools, *agent.tool_list)]  # a list: a name may be unhashable
    if not names or not all(name in known for name in names):
        raise BadParameter(
            "tool_choice: accepted: 'none', 'auto', 'required', or a function among the tools.", "tool_choice"
        )
    return "auto" if mode == "auto" else names


def _allowed(choice: Any) -> tuple[str | None, list[Any]]:
    """The mode of a choice among several tools, and their names; `None` if `choice` is no such choice."""
    match choice:
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)},
        } | {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": list(listed),
        }:
            functions = [each.get("function", each) if isinstance(each, dict) else None for each in listed]
            return mode, [each.get("name") if isinstance(each, dict) else None for each in functions]
        case _:
            return None, []


def _offered(choice: Any, tools: tuple[ExternalTool, ...]) -> tuple[ExternalTool, ...]:
    """Those of the client's tools that the model may call. The agent's own tools are not the client's to leave out."""
    mode, names = _allowed(choice)
    return tools if mode != "auto" else tuple(each for each in tools if each.name in names)


def _supported(settings: dict[str, Any], agent: Agent, runtime: Runtime) -> dict[str, Any]:
    """The settings, without those that ask for nothing and that the agent's model does not take.

    Nothing is checked if this process cannot tell what the model takes: it may lack the vendor's key.

    Raises:
        BadParameter: the model does not take a setting.
    """
    asked = agent.asked_model(runtime.settings.model)
    try:
        known = supported_by(runtime.models(asked))
    except (PerdureError, SettingsError):
        return settings
    for name, value in settings.items():
        if name not in known and not (name in _NOTHING and value == _NOTHING[name]):
            member = next(each for each in (*_SETTINGS, "tool_choice") if _SETTINGS.get(each, each) == name)
            raise BadParameter(f"{member}: the model {name_of(asked)} of this agent does not take it.", member)
    return {name: value for name, value in settings.items() if name in known}


def _instructions(body: ChatRequest | ResponseRequest, runtime: Runtime, caller: Caller) -> str | None:
    """The client's instructions: `instructions`, and the messages of the roles `system` and `developer`."""
    member = "messages" if isinstance(body, ChatRequest) else "input"
    said = [("instructions", body.instructions)] if isinstance(body, ResponseRequest) and body.instructions else []
    for position, each in enumerate(body.items()):
        if each.get("role") in _SYSTEM:
            where = f"{member}[{position}]"
            said.append((where, texts_of(each.get("content"), f"{where}.content")))
    allowed = runtime.settings.guard.client_instructions
    if not said or allowed is ClientInstructions.IGNORE:
        return None
    where, text = said[0][0], "\n\n".join(text for _, text in said if text.strip())
    if allowed is ClientInstructions.SERVICES and caller.kind is KeyKind.USER:
        raise BadParameter(
            f"{where}: instructions are accepted from a service key only (PERDURE_GUARD__CLIENT_INSTRUCTIONS).", where
        )
    longest = runtime.settings.guard.max_chars
    if len(text) > longest:
        raise BadParameter(f"{where}: the instructions are longer than {longest} characters.", where)
    return text or None


def _output(body: ChatRequest | ResponseRequest, agent: Agent) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must fit; `None`: it is text."""
    if isinstance(body, ChatRequest):
        wanted, where, nested = body.response_format, "response_format", True
    else:
        wanted, where, nested = (body.text or {}).get("format"), "text.format", False
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if wanted is None or kind == "text":
        return None
    if agent.output_type is not None:
        raise BadParameter(f"{where}: the agent {agent.name!r} has an output of its own.", where)
    if kind == "json_object":
        return {"type": "object"}
    given = wanted.get("json_schema") if nested and isinstance(wanted, Mapping) else wanted
    schema = given.get("schema") if kind == "json_schema" and isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        accepted = "'text', 'json_object', or 'json_schema' with a schema of type object"
        raise BadParameter(f"{where}: accepted: {accepted}.", where)
    return schema
