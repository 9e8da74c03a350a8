"""Anthropic's Messages wire format of prompts and streamed replies.

`request_body` converts every transcript to a request that the provider accepts. The rules differ from those of Chat
Completions:

- The system prompt is a separate field.
- User and assistant messages alternate. The first and the last message are user messages.
- No text is blank.
- If a message has tool calls, the next message begins with the results of all of them.
- If any message has tool calls, the request must define tools.

Replies are untrusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.errors import InvalidResponse
from perdure.models import endings
from perdure.models.protocol import Message, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.models.providers.json_values import as_count, as_object, as_string
from perdure.models.providers.reply import ReplyDraft, ToolCallDraft
from perdure.models.providers.wire_names import WireIds, WireNames
from perdure.text import untrusted

MAX_TOKENS = 16_384
"""Maximum tokens of a reply. Each request must contain a limit. All models of the provider accept this value."""

_EMPTY_TEXT = "(nothing)"
_OVERFLOWED = "model_context_window_exceeded"
_REFUSED = "refusal"
"""The provider's classifiers ended the reply. A refusal in the model's own words ends with `end_turn`."""

Block = dict[str, Any]


def request_body(model: str, request: ModelRequest) -> dict[str, Any]:
    """The body of a streaming request to `/v1/messages`."""
    names = names_of(request)
    system = "\n\n".join(each.content for each in request.messages if each.role is Role.SYSTEM and each.content.strip())
    spoken = [each for each in request.messages if each.role is not Role.SYSTEM]
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "messages": _turns(_blocks(spoken, names)),
        "stream": True,
    }
    if system:
        body["system"] = system
    return body | _tools(request, names)


def names_of(request: ModelRequest) -> WireNames:
    return WireNames(tool.name for tool in request.tools)


def _tools(request: ModelRequest, names: WireNames) -> dict[str, Any]:
    if request.tools:
        return {
            "tools": [
                {
                    "name": names.to_wire(each.name),
                    "description": each.description,
                    "input_schema": dict(each.parameters),
                }
                for each in request.tools
            ]
        }
    called = dict.fromkeys(names.to_wire(call.name) for message in request.messages for call in message.tool_calls)
    if not called:
        return {}
    # The provider requires definitions of all tools that the conversation calls. `tool_choice` forbids new calls.
    return {
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in called],
        "tool_choice": {"type": "none"},
    }


def _blocks(messages: Sequence[Message], names: WireNames) -> Iterator[tuple[str, list[Block]]]:
    """The role and the content blocks of each message."""
    ids = WireIds(translate=True)
    for message in messages:
        if message.role is Role.TOOL:
            yield "user", [_result(message, ids.of_result(message.tool_call_id or ""))]
        elif message.role is Role.USER:
            yield "user", _text_blocks(message.content) or _text_blocks(_EMPTY_TEXT)
        else:
            wire_ids = ids.assign(call.id for call in message.tool_calls)
            calls = [_call(each, wire_ids[each.id], names) for each in message.tool_calls]
            yield "assistant", [*_text_blocks(message.content), *calls]


def _turns(spoken: Iterator[tuple[str, list[Block]]]) -> list[dict[str, Any]]:
    """Merge consecutive messages of one role, so that user and assistant messages alternate.

    Also inserts a short user message at the beginning and at the end, unless a user message is already there.
    """
    turns: list[dict[str, Any]] = []
    for role, blocks in spoken:
        if not turns and role == "assistant" and blocks:
            turns.append(_filler())
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": list(blocks)})
    if not turns or turns[-1]["role"] == "assistant":
        turns.append(_filler())
    return turns


def _filler() -> dict[str, Any]:
    return {"role": "user", "content": _text_blocks(_EMPTY_TEXT)}


def _text_blocks(content: str) -> list[Block]:
    return [{"type": "text", "text": content}] if content.strip() else []


def _result(message: Message, wire_id: str) -> Block:
    block = {"type": "tool_result", "tool_use_id": wire_id}
    return {**block, "content": message.content} if message.content.strip() else block


def _call(call: ToolCall, wire_id: str, names: WireNames) -> Block:
    try:
        arguments = untrusted.load_object(call.arguments)
    except ValueError:
        arguments = {}
    return {"type": "tool_use", "id": wire_id, "name": names.to_wire(call.name), "input": arguments}


class ReplyAssembler:
    """Assembles a reply from the events of a stream."""

    def __init__(self, names: WireNames | None = None) -> None:
        """`names` translates the tool names in the reply. By default, they stay as the model wrote them."""
        self.complete = False
        self._draft = ReplyDraft(names or WireNames())
        self._calls: dict[object, ToolCallDraft] = {}
        self._unstreamed: list[tuple[ToolCallDraft, str]] = []
        self._empty: set[object] = set()
        """The indexes of calls with an empty piece of arguments.

        The provider streams the arguments `{}` as one empty piece, and then ends the block.
        """
        self._usage: dict[str, int] = {}

    def feed(self, event: object) -> str:
        """Add one event and return its text. The last event sets `complete`.

        Raises:
            InvalidResponse: the event is malformed, or the reply is too long or has too many calls.
        """
        if not isinstance(event, dict):
            raise InvalidResponse("The model's server sent something that is not part of a reply.")
        match event.get("type"):
            case "message_start":
                message = as_object(event.get("message"))
                self._draft.model = as_string(message.get("model"))
                self._count(message)
            case "content_block_start":
                return self._begin(event.get("index"), as_object(event.get("content_block")))
            case "content_block_delta":
                return self._continue(event.get("index"), as_object(event.get("delta")))
            case "content_block_stop" if (key := _key(event.get("index"))) in self._empty:
                self._unstreamed.append((self._calls[key], "{}"))
            case "message_delta":
                self._draft.end(as_string(as_object(event.get("delta")).get("stop_reason")))
                self._count(event)
            case "message_stop":
                self.complete = True
            case _:
                pass  # the provider may add new types of events
        return ""

    def finish(self) -> tuple[str, ModelReply]:
        """The text that `feed` has not returned yet, and the complete reply.

        Raises:
            PerdureError: see `ReplyDraft.finish`.
        """
        for call, arguments in self._unstreamed:
            if not call.arguments:
                self._draft.extend_call(call, arguments=arguments)
        self._draft.overflowed = self._draft.stop_reason == _OVERFLOWED
        if self._draft.stop_reason == _REFUSED:
            self._draft.stop_reason = endings.CONTENT_FILTER
        return self._draft.finish()

    def _begin(self, index: object, block: Mapping[str, Any]) -> str:
        if block.get("type") != "tool_use":  # thinking and the provider's own tools are not part of the reply
            return self._draft.add_text(as_string(block.get("text"))) if block.get("type") == "text" else ""
        call = self._calls[_key(index)] = self._draft.add_call()
        call.id = as_string(block.get("id"))
        self._draft.extend_call(call, name=as_string(block.get("name")))
        if whole_input := as_object(block.get("input")):  # from servers that do not stream arguments
            self._unstreamed.append((call, json.dumps(whole_input)))
        return ""

    def _continue(self, index: object, delta: Mapping[str, Any]) -> str:
        if delta.get("type") == "text_delta":
            return self._draft.add_text(as_string(delta.get("text")))
        if delta.get("type") == "input_json_delta":
            call = self._calls.get(_key(index))
            if call is None:
                raise InvalidResponse("The model's server sent arguments that belong to no tool call.")
            self._draft.extend_call(call, arguments=as_string(delta.get("partial_json")))
            if delta.get("partial_json") == "":
                self._empty.add(_key(index))
        return ""

    def _count(self, holder: Mapping[str, Any]) -> None:
        """Update the token counts. The provider's counts are cumulative, so a later count replaces an earlier one."""
        for name, value in as_object(holder.get("usage")).items():
            if (count := as_count(value)) is not None:
                self._usage[name] = count
        read = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        if "output_tokens" in self._usage and any(each in self._usage for each in read):
            self._draft.usage = Usage(
                input_tokens=sum(self._usage.get(each, 0) for each in read),
                output_tokens=self._usage["output_tokens"],
                cached_tokens=self._usage.get("cache_read_input_tokens", 0),
            )


def _key(index: object) -> object:
    return index if isinstance(index, int) else None
