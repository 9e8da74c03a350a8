"""The Chat Completions wire format: a prompt on its way out, a streamed reply on its way in.

Outwards it keeps law 5: whatever the transcript holds, what is sent is a transcript that a
provider accepts. Inwards it trusts nothing: servers that call themselves compatible split
and repeat tool calls each in its own way, and leave out what they do not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure import untrusted
from perdure.errors import InvalidResponse
from perdure.models.protocol import Message, ModelReply, ModelRequest, Role, ToolCall, ToolSchema, Usage

MAX_REPLY_CHARS = 2_000_000
"""Characters, text and arguments together, beyond which a reply is no reply but a runaway server."""

MAX_TOOL_CALLS = 128
"""Calls that one message may hold by the provider's own rules."""

_MAX_ID = 40
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")


def request_body(model: str, request: ModelRequest) -> dict[str, Any]:
    """The body of a streaming request to `/chat/completions`."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(_wire_messages(request.messages)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        body["tools"] = [_wire_tool(each) for each in request.tools]
    return body


def _wire_tool(tool: ToolSchema) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _wire_messages(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Each message in wire form, every call id unique over the whole prompt.

    A provider may give the same call id in two replies, and refuses a prompt that holds it
    twice. A result belongs to the newest message that asked for calls.
    """
    used: set[str] = set()
    asked: dict[str, str] = {}
    for message in messages:
        if message.role is Role.TOOL:
            given = message.tool_call_id or ""
            yield {"role": "tool", "tool_call_id": asked.get(given, given), "content": message.content}
        elif message.tool_calls:
            asked = {call.id: _unused(call.id, used) for call in message.tool_calls}
            calls = [_wire_call(call, asked[call.id]) for call in message.tool_calls]
            yield {"role": message.role.value, "content": message.content or None, "tool_calls": calls}
        else:
            yield {"role": message.role.value, "content": message.content}


def _unused(wanted: str, used: set[str]) -> str:
    """`wanted`, or something like it that is not in `used` yet; adds it there."""
    made = wanted[:_MAX_ID] or "call"
    number = 1
    while made in used:
        number += 1
        made = f"{(wanted or 'call')[: _MAX_ID - 8]}_{number}"
    used.add(made)
    return made


def _wire_call(call: ToolCall, wire_id: str) -> dict[str, Any]:
    # A name that the model made up comes back to the provider, which refuses all but these characters.
    name = _NOT_IN_A_NAME.sub("_", call.name)[:64] or "unknown"
    return {"id": wire_id, "type": "function", "function": {"name": name, "arguments": _wire_arguments(call.arguments)}}


def _wire_arguments(arguments: str) -> str:
    try:
        return arguments if untrusted.load_object(arguments) else "{}"
    except ValueError:
        return "{}"


@dataclass(slots=True)
class _Call:
    """A tool call as it grows."""

    id: str
    name: str
    arguments: list[str]


class Assembly:
    """A reply, put together from the chunks of a stream."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._held_back = ""
        self._size = 0
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._model = ""
        self._stop_reason = ""
        self._usage = Usage()

    def feed(self, chunk: object) -> str:
        """Take in one chunk and return the text that it adds.

        Raises:
            InvalidResponse: it is no chunk of a chat completion, or the reply grows out of all bounds.
        """
        if not isinstance(chunk, dict):
            raise InvalidResponse("The model's server sent something that is not part of a reply.")
        self._model = self._model or _text(chunk.get("model"))
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))
        choice = _first_choice(chunk)
        self._stop_reason = _text(choice.get("finish_reason")) or self._stop_reason
        delta = _mapping(choice.get("delta")) or _mapping(choice.get("message"))
        for fragment in _sequence(delta.get("tool_calls")):
            self._take_call(_mapping(fragment))
        return self._take_text(_text(delta.get("content")) + _text(delta.get("refusal")))

    def finish(self) -> tuple[str, ModelReply]:
        """The text still held back, and the whole reply.

        Raises:
            InvalidResponse: the stream ended early, or held neither text nor a tool call.
        """
        if not self._stop_reason:
            raise InvalidResponse("The model's reply ended before it was finished.")
        rest = untrusted.storable(self._held_back)
        content = "".join(self._text) + rest
        if not content.strip() and not self._calls:
            raise InvalidResponse(f"The model's reply was empty (it stopped because of: {self._stop_reason}).")
        reply = ModelReply(
            content=content,
            tool_calls=tuple(self._finished_calls()),
            usage=self._usage,
            model=untrusted.storable(self._model),
            stop_reason=untrusted.storable(self._stop_reason),
        )
        return rest, reply

    def _take_text(self, text: str) -> str:
        if not text:
            return ""
        self._grow(text)
        text = self._held_back + text
        # A server that cuts text by UTF-16 units may part the two halves of one character.
        cut_at = len(text) - 1 if "\ud800" <= text[-1] <= "\udbff" else len(text)
        self._held_back = text[cut_at:]
        whole = untrusted.storable(text[:cut_at])
        self._text.append(whole)
        return whole

    def _take_call(self, fragment: Mapping[str, Any]) -> None:
        function = _mapping(fragment.get("function"))
        name = _text(function.get("name"))
        given_id = _text(fragment.get("id"))
        arguments = function.get("arguments")
        call = self._call_of(fragment.get("index"), given_id, name)
        call.id = call.id or given_id
        if name != call.name:
            call.name += name
        piece = json.dumps(arguments) if isinstance(arguments, dict) else _text(arguments)
        self._grow(name + piece)
        call.arguments.append(piece)

    def _call_of(self, index: object, given_id: str, name: str) -> _Call:
        """The call that a fragment continues, or a new one.

        A fragment begins a new call if its index is new, or if it brings both a name and
        another id (there are servers that give every call the index 0). Without an index,
        the id tells; without either, a name after arguments that are already complete.
        """
        if isinstance(index, int):
            call = self._by_index.get(index)
            if call is None or (name and given_id and call.id and given_id != call.id):
                call = self._by_index[index] = self._new_call()
            return call
        if not self._calls:
            return self._new_call()
        last = self._calls[-1]
        if given_id:
            return next((call for call in self._calls if call.id == given_id), None) or self._new_call()
        if name and (name != last.name or _complete(last)):
            return self._new_call()
        return last

    def _new_call(self) -> _Call:
        if len(self._calls) == MAX_TOOL_CALLS:
            raise InvalidResponse(f"The model asked for more than {MAX_TOOL_CALLS} tool calls at once.")
        self._calls.append(_Call("", "", []))
        return self._calls[-1]

    def _finished_calls(self) -> Iterator[ToolCall]:
        used: set[str] = set()
        for number, call in enumerate(self._calls, start=1):
            yield ToolCall(
                id=_unused(untrusted.storable(call.id) or f"call_{number}", used),
                name=untrusted.storable(call.name),
                arguments=untrusted.storable("".join(call.arguments)),
            )

    def _grow(self, text: str) -> None:
        self._size += len(text)
        if self._size > MAX_REPLY_CHARS:
            raise InvalidResponse(f"The model's reply is longer than {MAX_REPLY_CHARS:,} characters.")


def _complete(call: _Call) -> bool:
    try:
        untrusted.load_object("".join(call.arguments))
    except ValueError:
        return False
    return bool(call.arguments)


def _first_choice(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = [_mapping(each) for each in _sequence(chunk.get("choices"))]
    return next((each for each in choices if not each.get("index")), {})


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
