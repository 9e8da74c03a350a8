"""Translates prompts to the messages of pydantic-ai, and its responses to what is stored with a reply.

A reply that carries more than text and calls, such as signatures and thoughts, is stored as the JSON of pydantic-ai's
`ModelResponse`. The same endpoint and model family get exactly this response back. Any other model gets its text and
its calls, and so does a release of pydantic-ai that cannot read the JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.messages import ModelRequest as Request
from pydantic_ai.usage import RequestUsage

from perdure.models import endings
from perdure.models.notes import placed
from perdure.models.protocol import Attachment, Message, Opaque, Role, ToolCall, Usage
from perdure.models.providers.json_values import as_count, as_object
from perdure.models.providers.reply import EMPTY_TEXT
from perdure.models.providers.wire_names import PLAIN_CHARACTERS, WireIds, WireNames
from perdure.text import untrusted

log = logging.getLogger(__name__)

PART = "pydantic_ai"
"""The name in `Opaque.parts` of the response's JSON, a string: the JSON may have NUL characters, escaped."""

_WITHOUT_WORDS_OF_THEIR_OWN = (None, "xai", "test", "function")
"""The providers whose responses do not have the server's own finish reason."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The endpoint and the model family that a model's replies come from."""

    endpoint: str
    family: str

    def opaque(self, response: ModelResponse) -> Opaque | None:
        """What the sender needs back with the next prompt; `None` if it is only text and calls.

        Raises:
            ValueError: the response cannot be stored.
        """
        if not any(_carries_more(part) for part in response.parts):
            return None
        stored = ModelMessagesTypeAdapter.dump_json([replace(response, usage=RequestUsage())], exclude_none=True)
        return Opaque(self.endpoint, self.family, {PART: stored.decode()})


def _carries_more(part: ModelResponsePart) -> bool:
    return not isinstance(part, TextPart | ToolCallPart) or bool(part.id or part.provider_details)


def prompt(
    messages: Sequence[Message], names: WireNames, sender: Sender | None, reads: Collection[str] = ()
) -> list[ModelMessage]:
    """The messages for a model of `sender`, which reads files of the media types in `reads`.

    No response is sent as it was stored if `sender` is `None`.

    Requests and responses alternate; the first and the last are requests.
    """
    ids = WireIds(PLAIN_CHARACTERS)
    called: Mapping[str, str] = {}
    found: list[ModelMessage] = []
    given = placed(messages)
    notes = [replace(each, role=Role.USER) if each.role is Role.SYSTEM else each for each in given.messages]
    spoken = [*(Message(Role.SYSTEM, each) for each in given.system), *notes]
    for is_reply, group in groupby(spoken, key=lambda message: message.role is Role.ASSISTANT):
        if not is_reply:
            found.append(Request(parts=[_asked(each, ids, called, reads) for each in group]))
            continue
        replies = list(group)
        called = {call.id: names.to_wire(call.name) for each in replies for call in each.tool_calls}
        responses = [_response(each, names, ids, sender) for each in replies]
        merged = replace(responses[-1], parts=[part for each in responses for part in each.parts])
        if merged.parts:
            found.append(merged)
    return _between_requests(found)


def _between_requests(messages: list[ModelMessage]) -> list[ModelMessage]:
    filler = Request(parts=[UserPromptPart(EMPTY_TEXT)])
    if not messages or isinstance(messages[-1], ModelResponse):
        messages.append(filler)
    spoken = next((at for at, each in enumerate(messages) if not _is_system(each)), 0)
    if isinstance(messages[spoken], ModelResponse):
        messages.insert(spoken, filler)
    return messages


def _is_system(message: ModelMessage) -> bool:
    return isinstance(message, Request) and all(isinstance(part, SystemPromptPart) for part in message.parts)


def _asked(
    message: Message, ids: WireIds, called: Mapping[str, str], reads: Collection[str]
) -> SystemPromptPart | UserPromptPart | ToolReturnPart:
    match message.role:
        case Role.SYSTEM:
            return SystemPromptPart(message.content)
        case Role.TOOL:
            call_id = message.tool_call_id or ""
            return ToolReturnPart(called.get(call_id, "unknown"), _content(message, reads), ids.of_result(call_id))
        case _:
            return UserPromptPart(_content(message, reads))


def _content(message: Message, reads: Collection[str]) -> str | list[UserContent]:
    pieces = message.pieces(reads)
    if not any(isinstance(each, Attachment) for each in pieces):
        return message.content if message.content.strip() else EMPTY_TEXT
    return [each if isinstance(each, str) else BinaryContent(each.data, media_type=each.media_type) for each in pieces]


def _response(message: Message, names: WireNames, ids: WireIds, sender: Sender | None) -> ModelResponse:
    wire_ids = [ids.assign(call.id) for call in message.tool_calls]
    stored = _stored(message, names, sender)
    if stored is None:
        calls = [
            ToolCallPart(names.to_wire(call.name), _arguments(call.arguments), wire_id)
            for call, wire_id in zip(message.tool_calls, wire_ids, strict=True)
        ]
        text = [TextPart(message.content)] if message.content.strip() else []
        return ModelResponse(parts=[*text, *calls])
    ids_in_order = iter(wire_ids)
    parts = [
        replace(part, tool_call_id=next(ids_in_order)) if isinstance(part, ToolCallPart) else part
        for part in stored.parts
    ]
    return replace(stored, parts=parts)


def _stored(message: Message, names: WireNames, sender: Sender | None) -> ModelResponse | None:
    """The response as its sender sent it; `None` if it is another's, unreadable, or not the message any more."""
    opaque = message.opaque
    if opaque is None or sender is None or not opaque.is_from(sender.endpoint, sender.family):
        return None
    if PART not in opaque.parts:
        return None
    try:
        (response,) = ModelMessagesTypeAdapter.validate_json(opaque.parts[PART])
    except ValueError as error:  # another release of pydantic-ai wrote it
        log.warning("a stored response of %s cannot be read: %s", sender.endpoint, untrusted.error_summary(error))
        return None
    if not isinstance(response, ModelResponse):
        return None
    calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
    is_same = text_of(response.parts) == message.content and [
        (part.tool_name, untrusted.storable(arguments_of(part))) for part in calls
    ] == [(names.to_wire(call.name), call.arguments) for call in message.tool_calls]
    are_sendable = all(_arguments(call.arguments) == (call.arguments.strip() or "{}") for call in message.tool_calls)
    return response if is_same and are_sendable else None


def text_of(parts: Sequence[ModelResponsePart]) -> str:
    return untrusted.storable("".join(part.content for part in parts if isinstance(part, TextPart)))


def arguments_of(part: ToolCallPart) -> str:
    return part.args_as_json_str() if isinstance(part.args, dict) else part.args or ""


def _arguments(arguments: str) -> str:
    """The arguments of a call, as a text that is a JSON object."""
    try:
        return arguments if untrusted.load_object(arguments) else "{}"
    except ValueError:
        return "{}"


def calls_in(messages: Sequence[Message], names: WireNames) -> Iterator[str]:
    """The names of the tools that a conversation calls, each once, as the provider knows them."""
    calls: Iterator[ToolCall] = (call for message in messages for call in message.tool_calls)
    yield from dict.fromkeys(names.to_wire(call.name) for call in calls)


def finish_reason(response: ModelResponse) -> str:
    """Why the server ended the reply, in the server's words; empty if the stream ended without a reason.

    pydantic-ai replaces a missing reason by `stop` for some providers.
    """
    if response.finish_reason == "content_filter":
        return endings.CONTENT_FILTER
    said = (response.provider_details or {}).get("finish_reason")
    if isinstance(said, str) and said:
        return said
    if response.provider_name in _WITHOUT_WORDS_OF_THEIR_OWN and response.state == "complete":
        return response.finish_reason or endings.STOP
    return "" if response.finish_reason in {None, "stop"} else str(response.finish_reason)


def usage_of(reported: Mapping[str, Any]) -> Usage | None:
    """The tokens of a response, from the members of pydantic-ai's `RequestUsage` that the provider reported.

    They are the attributes of the object itself: for any other count, its class has the value 0.
    """
    read, written = as_count(reported.get("input_tokens")), as_count(reported.get("output_tokens"))
    if reported.get("unmeasured_requests") or read is None or written is None:
        return None
    thoughts = reported.get("output_reasoning_tokens", as_object(reported.get("details")).get("reasoning_tokens"))
    return Usage(read, written, as_count(reported.get("cache_read_tokens")), as_count(thoughts))
