"""The Chat Completions wire format of prompts and streamed replies.

`request_body` converts every transcript to a request that providers accept. Replies are untrusted. Compatible servers
omit fields, and differ in how they split and repeat tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.errors import InvalidResponse
from perdure.models import endings
from perdure.models.protocol import Message, ModelReply, ModelRequest, Role, ToolCall, ToolSchema, Usage
from perdure.models.providers.json_values import as_array, as_count, as_object, as_string
from perdure.models.providers.reply import ReplyDraft, ToolCallDraft
from perdure.models.providers.wire_names import WireIds, WireNames
from perdure.text import untrusted


def request_body(model: str, request: ModelRequest) -> dict[str, Any]:
    """The body of a streaming request to `/chat/completions`."""
    names = names_of(request)
    body: dict[str, Any] = {
        "model": model,
        "messages": list(_wire_messages(request.messages, names)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        body["tools"] = [_wire_tool(each, names) for each in request.tools]
    return body


def names_of(request: ModelRequest) -> WireNames:
    return WireNames(tool.name for tool in request.tools)


def _wire_tool(tool: ToolSchema, names: WireNames) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": names.to_wire(tool.name), "description": tool.description, "parameters": tool.parameters},
    }


def _wire_messages(messages: Sequence[Message], names: WireNames) -> Iterator[dict[str, Any]]:
    ids = WireIds(translate=False)
    for message in messages:
        if message.role is Role.TOOL:
            call_id = message.tool_call_id or ""
            yield {"role": "tool", "tool_call_id": ids.of_result(call_id), "content": message.content}
        elif message.tool_calls:
            wire_ids = ids.assign(call.id for call in message.tool_calls)
            calls = [_wire_call(call, wire_ids[call.id], names) for call in message.tool_calls]
            yield {"role": message.role.value, "content": message.content or None, "tool_calls": calls}
        else:
            yield {"role": message.role.value, "content": message.content}


def _wire_call(call: ToolCall, wire_id: str, names: WireNames) -> dict[str, Any]:
    function = {"name": names.to_wire(call.name), "arguments": _wire_arguments(call.arguments)}
    return {"id": wire_id, "type": "function", "function": function}


def _wire_arguments(arguments: str) -> str:
    try:
        return arguments if untrusted.load_object(arguments) else "{}"
    except ValueError:
        return "{}"


class ReplyAssembler:
    """Assembles a reply from the chunks of a stream."""

    def __init__(self, names: WireNames | None = None) -> None:
        """`names` translates the tool names in the reply. By default, they stay as the model wrote them."""
        self._draft = ReplyDraft(names or WireNames())
        self._by_index: dict[int, ToolCallDraft] = {}
        self._refused = False

    def feed(self, chunk: object) -> str:
        """Add one chunk and return its text.

        Raises:
            InvalidResponse: the chunk is malformed, or the reply is too long or has too many calls.
        """
        if not isinstance(chunk, dict):
            raise InvalidResponse("The model's server sent something that is not part of a reply.")
        draft = self._draft
        draft.model = draft.model or as_string(chunk.get("model"))
        if isinstance(usage := chunk.get("usage"), dict):
            read, written = as_count(usage.get("prompt_tokens")), as_count(usage.get("completion_tokens"))
            cached = as_count(as_object(usage.get("prompt_tokens_details")).get("cached_tokens"))
            draft.usage = None if read is None or written is None else Usage(read, written, cached or 0)
        choice = _first_choice(chunk)
        draft.end(as_string(choice.get("finish_reason")))
        delta = as_object(choice.get("delta")) or as_object(choice.get("message"))
        self._refused |= bool(as_string(delta.get("refusal")))
        for fragment in as_array(delta.get("tool_calls")):
            self._add_fragment(as_object(fragment))
        return draft.add_text(as_string(delta.get("content")) + as_string(delta.get("refusal")))

    def finish(self) -> tuple[str, ModelReply]:
        """The text that `feed` has not returned yet, and the complete reply.

        Raises:
            PerdureError: see `ReplyDraft.finish`.
        """
        if self._refused and self._draft.stop_reason:  # the provider itself ends a refusal with `stop`
            self._draft.stop_reason = endings.REFUSAL
        return self._draft.finish()

    def _add_fragment(self, fragment: Mapping[str, Any]) -> None:
        function = as_object(fragment.get("function"))
        name = as_string(function.get("name"))
        given_id = as_string(fragment.get("id"))
        arguments = function.get("arguments")
        call = self._call_of(fragment.get("index"), given_id, name)
        call.id = call.id or given_id
        piece = json.dumps(arguments) if isinstance(arguments, dict) else as_string(arguments)
        self._draft.extend_call(call, name=name if name != call.name else "", arguments=piece)

    def _call_of(self, index: object, given_id: str, name: str) -> ToolCallDraft:
        """The call that a fragment belongs to: an earlier call or a new one.

        A fragment with an index begins a new call in two cases:

        - The index is new.
        - The fragment has a name, and its id differs from the id of the call with this index. Some servers give every
          call the index 0.

        A fragment without an index begins a new call in three cases:

        - Its id is new.
        - It has no id, and its name differs from the last call's name.
        - It has no id but a name, and the last call's arguments are complete.
        """
        if isinstance(index, int):
            call = self._by_index.get(index)
            if call is None or (name and given_id and call.id and given_id != call.id):
                call = self._by_index[index] = self._draft.add_call()
            return call
        calls = self._draft.calls
        if not calls:
            return self._draft.add_call()
        last = calls[-1]
        if given_id:
            return next((call for call in calls if call.id == given_id), None) or self._draft.add_call()
        if name and (name != last.name or _complete(last)):
            return self._draft.add_call()
        return last


def _complete(call: ToolCallDraft) -> bool:
    try:
        untrusted.load_object("".join(call.arguments))
    except ValueError:
        return False
    return bool(call.arguments)


def _first_choice(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = [as_object(each) for each in as_array(chunk.get("choices"))]
    return next((each for each in choices if not each.get("index")), {})
