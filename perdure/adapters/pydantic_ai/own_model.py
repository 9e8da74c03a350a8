"""A model of perdure as a model of pydantic-ai: for agents without a model of their own, and for scripted tests.

The turn calls the model of perdure in its own thread (`turn.AdaptedTurn`), with its resilience, streaming and deadline.
This class makes the prompt of pydantic-ai's messages, and a response of the reply.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import anyio.to_thread
from pydantic_ai.messages import (
    BinaryContent,
    CachePoint,
    FileUrl,
    InstructionPart,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    TextContent,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.settings import ModelSettings, ToolOrOutput
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from perdure.adapters.pydantic_ai.messages import Note
from perdure.clock import Clock
from perdure.models import endings, output_tool
from perdure.models.protocol import (
    Attachment,
    Message,
    ModelCall,
    ModelReply,
    Opaque,
    Role,
    ToolCall,
    ToolSchema,
    Usage,
)
from perdure.models.protocol import Model as Own
from perdure.models.protocol import ModelRequest as Request
from perdure.models.schemas import enforceable
from perdure.models.settings import of_call
from perdure.runtime import Runtime
from perdure.turns.transcript import reply_entry

_OPAQUE, _CHOICE = "perdure", "tool_choice"
_FINISHES = {endings.STOP: "stop", endings.TOOL_CALLS: "tool_call", endings.LENGTH: "length"}


class OwnModel(Model[Any]):
    """The model `own` of perdure."""

    def __init__(self, own: Own, clock: Clock, timeout_s: float, defaults: Mapping[str, Any]) -> None:
        """`defaults` are the settings that an agent's own replace, member by member: `PERDURE_MODEL_SETTINGS`."""
        # pydantic-ai refuses a model that must call a tool in each step, so `prompt` adds the choice of tools.
        settings = {name: value for name, value in defaults.items() if name != _CHOICE}
        super().__init__(
            settings=cast("ModelSettings", settings),
            profile=ModelProfile(supports_tools=True, supports_thinking=True, supports_json_schema_output=True),
        )
        self.own = own
        self._clock = clock
        self._timeout_s = timeout_s
        self._default_choice = {name: value for name, value in defaults.items() if name == _CHOICE}

    @classmethod
    def of(cls, own: Own, runtime: Runtime) -> OwnModel:
        """The model `own` with the settings of the installation."""
        return cls(own, runtime.clock, runtime.settings.model_timeout_s, runtime.settings.model_settings)

    @property
    def model_name(self) -> str:
        return self.own.name

    @property
    def system(self) -> str:
        return "perdure"

    @property
    def provider(self) -> None:
        return None

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        """Reply to a prompt that no turn sends: that of an agent which a tool runs with its own model."""
        request = self.prompt(messages, model_settings, model_request_parameters)
        call = ModelCall(self._clock, self._timeout_s)
        return self.response(await anyio.to_thread.run_sync(self.own.respond, request, call))

    def prompt(
        self,
        messages: Sequence[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
        cache_key: str | None = None,
    ) -> Request:
        """The prompt of perdure for pydantic-ai's messages."""
        prepared, parameters = self.prepare_request(settings, parameters)
        instructions = InstructionPart.join(self._get_instruction_parts(messages, parameters) or [])
        system = [instructions] if instructions else []
        said: list[Message] = []
        for each in messages:
            if isinstance(each, ModelRequest):
                system += [part.content for part in each.parts if isinstance(part, SystemPromptPart)]
                said += [_told(part) for part in each.parts if not isinstance(part, SystemPromptPart)]
            else:
                said.append(_replied(each))
        tools = _offered(prepared, parameters)
        first = [Message(Role.SYSTEM, "\n\n".join(system))] if system else []
        schemas = tuple(schema_of(each) for each in tools)
        given = self._given(prepared, parameters, messages, [each.name for each in tools])
        native = parameters.output_object if parameters.output_mode == "native" else None
        output = None if native is None else enforceable(native.json_schema)
        return Request((*first, *said), schemas, given, output, requires_output=native is not None, cache_key=cache_key)

    def _given(
        self,
        prepared: ModelSettings | None,
        parameters: ModelRequestParameters,
        messages: Sequence[ModelMessage],
        tools: Sequence[str],
    ) -> dict[str, Any]:
        given = {name: each for name, each in (prepared or {}).items() if name != "timeout"} | _timeout(prepared)
        if _only(prepared, parameters) is not None:  # `tools` has what the choice leaves
            given[_CHOICE] = "auto"
        if parameters.thinking is not None:
            given["thinking"] = parameters.thinking
        newest = messages[-1:]
        found = of_call(
            self._default_choice, given, tools=tools,
            has_results=any(isinstance(part, ToolReturnPart) for each in newest for part in each.parts),
        )  # fmt: skip
        return found | _choice_for_output(found, parameters)

    def response(self, reply: ModelReply) -> ModelResponse:
        """The response of pydantic-ai for a reply."""
        text = [TextPart(reply.content)] if reply.content else []
        # pydantic-ai tells the calls of a reply apart by their ids.
        named = reply_entry(UUID(int=0), reply).tool_calls
        calls = [ToolCallPart(call.name, call.arguments, tool_call_id=call.id) for call in named]
        reason = endings.normalized(reply.stop_reason)
        return ModelResponse(
            parts=[*text, *calls],
            usage=RequestUsage() if reply.usage is None else _usage(reply.usage),
            model_name=reply.model or self.own.name,
            provider_details=None if reply.opaque is None else {_OPAQUE: reply.opaque.to_dict()},
            finish_reason=_FINISHES.get(reason, "content_filter" if reason == endings.CONTENT_FILTER else "error"),  # type: ignore[arg-type]
        )


def _only(settings: ModelSettings | None, parameters: ModelRequestParameters) -> Collection[str] | None:
    """The function tools of a choice that leaves the agent's outputs available; `None` if the choice is another."""
    choice = (settings or {}).get(_CHOICE)
    if isinstance(choice, ToolOrOutput):
        return choice.function_tools
    return () if choice == "none" and parameters.output_tools else None


def _offered(settings: ModelSettings | None, parameters: ModelRequestParameters) -> list[ToolDefinition]:
    only = _only(settings, parameters)
    tools = [each for each in parameters.declared_function_tools if only is None or each.name in only]
    return [*tools, *parameters.output_tools]


def _timeout(settings: ModelSettings | None) -> dict[str, float]:
    """The seconds of a call, as perdure's setting has them. Of an `httpx.Timeout`, those to read."""
    given = (settings or {}).get("timeout")
    seconds = getattr(given, "read", given)
    return {"timeout": seconds} if isinstance(seconds, int | float) else {}


def _choice_for_output(settings: Mapping[str, Any], parameters: ModelRequestParameters) -> dict[str, Any]:
    """The choice of tools of a prompt whose answer is a call of an output tool: a text would be refused.

    A model that thinks may answer in text; see `output_tool.with_tool`.
    """
    has_other_outputs = parameters.allow_text_output or parameters.allow_image_output
    if not parameters.output_tools or has_other_outputs or output_tool.thinks(settings):
        return {}
    return {_CHOICE: "required"} if settings.get(_CHOICE, "auto") == "auto" else {}


def _usage(usage: Usage) -> RequestUsage:
    """The usage of pydantic-ai, with the counts that were reported."""
    cached = {} if usage.cached_tokens is None else {"cache_read_tokens": usage.cached_tokens}
    details = {} if usage.reasoning_tokens is None else {"reasoning_tokens": usage.reasoning_tokens}
    return RequestUsage(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, details=details, **cached)


def _told(part: Any) -> Message:
    if isinstance(part, ToolReturnPart):
        returned = _with_files(Role.TOOL, [part.model_response_str(), *part.files])
        return replace(returned, tool_call_id=part.tool_call_id)
    if isinstance(part, RetryPromptPart) and part.tool_name is not None:
        return Message(Role.TOOL, part.model_response(), tool_call_id=part.tool_call_id)
    if isinstance(part, UserPromptPart) and isinstance(part.content, Note):
        return Message(Role.SYSTEM, str(part.content))
    if isinstance(part, UserPromptPart):
        return _with_files(Role.USER, [part.content] if isinstance(part.content, str) else part.content)
    return Message(Role.USER, part.model_response() if hasattr(part, "model_response") else str(part.content))


def _with_files(role: Role, content: Sequence[UserContent]) -> Message:
    """A message. A file has a line that describes it, for a model that does not read it."""
    text, files = "", list[Attachment]()
    for each in content:
        if isinstance(each, CachePoint):  # perdure marks prompts itself
            continue
        text = f"{text}\n" if text else text
        described = _line(each)
        if isinstance(each, BinaryContent):
            place = len(text), len(text) + len(described)
            files.append(Attachment(each.media_type, None, *place, each.data))
        text += described
    return Message(role, text, files=tuple(files))


def _line(content: UserContent) -> str:
    """The text, or a line that describes the file."""
    match content:
        case str():
            return content
        case TextContent():
            return content.content
        case BinaryContent():
            return f"[{'image' if content.is_image else 'file'}: {content.media_type}, {len(content.data)} bytes]"
        case FileUrl():
            return f"[{content.kind}: {content.url}]"
        case _:
            return f"[{content.kind}]"


def _replied(response: ModelResponse) -> Message:
    calls = tuple(ToolCall(each.tool_call_id, each.tool_name, each.args_as_json_str()) for each in response.tool_calls)
    stored = (response.provider_details or {}).get(_OPAQUE)
    opaque = None if stored is None else Opaque.from_dict(stored)
    return Message(Role.ASSISTANT, response.text or "", calls, opaque=opaque)


def schema_of(tool: ToolDefinition) -> ToolSchema:
    return ToolSchema(tool.name, tool.description or "", tool.parameters_json_schema)
