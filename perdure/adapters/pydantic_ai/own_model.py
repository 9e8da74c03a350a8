"""A model of perdure as a model of pydantic-ai: for agents without a model of their own, and for scripted tests.

The turn calls the model of perdure in its own thread (`turn.AdaptedTurn`), with its resilience, streaming and deadline.
This class makes the prompt of pydantic-ai's messages, and a response of the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import anyio.to_thread
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from perdure.adapters.pydantic_ai.messages import Note
from perdure.clock import Clock
from perdure.models import endings
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
from perdure.turns.transcript import reply_entry

_OPAQUE = "perdure"
_FINISHES = {endings.STOP: "stop", endings.TOOL_CALLS: "tool_call", endings.LENGTH: "length"}


class OwnModel(Model[Any]):
    """The model `own` of perdure."""

    def __init__(self, own: Own, clock: Clock, timeout_s: float) -> None:
        super().__init__(profile=ModelProfile(supports_tools=True))
        self.own = own
        self._clock = clock
        self._timeout_s = timeout_s

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
        newest = next((each for each in reversed(messages) if isinstance(each, ModelRequest)), None)
        system = [newest.instructions] if newest is not None and newest.instructions else []
        said: list[Message] = []
        for each in messages:
            if isinstance(each, ModelRequest):
                system += [part.content for part in each.parts if isinstance(part, SystemPromptPart)]
                said += [_told(part) for part in each.parts if not isinstance(part, SystemPromptPart)]
            else:
                said.append(_replied(each))
        tools = [*parameters.function_tools, *parameters.output_tools]
        first = [Message(Role.SYSTEM, "\n\n".join(system))] if system else []
        schemas = tuple(schema_of(each) for each in tools)
        return Request((*first, *said), schemas, dict(prepared or {}), cache_key=cache_key)

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
        text = f"{text}\n" if text else text
        described = each if isinstance(each, str) else f"[{each.kind}]"
        if isinstance(each, BinaryContent):
            described = f"[{'image' if each.is_image else 'file'}: {each.media_type}, {len(each.data)} bytes]"
            place = len(text), len(text) + len(described)
            files.append(Attachment(each.media_type, None, *place, each.data))
        text += described
    return Message(role, text, files=tuple(files))


def _replied(response: ModelResponse) -> Message:
    calls = tuple(ToolCall(each.tool_call_id, each.tool_name, each.args_as_json_str()) for each in response.tool_calls)
    stored = (response.provider_details or {}).get(_OPAQUE)
    opaque = None if stored is None else Opaque.from_dict(stored)
    return Message(Role.ASSISTANT, response.text or "", calls, opaque=opaque)


def schema_of(tool: ToolDefinition) -> ToolSchema:
    return ToolSchema(tool.name, tool.description or "", tool.parameters_json_schema)
