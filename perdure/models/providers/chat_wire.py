"""The Chat Completions wire format of prompts and streamed replies.

`request_body` converts every transcript to a request that providers accept. Replies are untrusted. Compatible servers
omit fields, and differ in how they split and repeat tool calls.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.models import endings
from perdure.models.protocol import Attachment, Message, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.models.providers.endpoint import NO_QUIRKS, Quirks
from perdure.models.providers.json_values import as_array, as_count, as_object, as_string
from perdure.models.providers.reply import Origin, ReplyDraft, SentBefore, ToolCallDraft
from perdure.models.providers.wire_names import ANY_CHARACTERS, WireIds, WireNames
from perdure.models.schemas import acceptable
from perdure.models.settings import NAMES
from perdure.text import untrusted

HEADERS: Mapping[str, str] = {}
REQUIRED = frozenset({"model", "messages", "stream", "tools"})
OUTPUT = "response_format"
"""The option with the schema of the reply."""

_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "stop_sequences": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "service_tier": "service_tier",
    "reasoning_effort": "reasoning_effort",
}
"""The names of settings in the request."""

SUPPORTED_SETTINGS = frozenset(NAMES) - {"top_k"}

_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text", "thinking")
"""The members with thoughts. Servers that send several send the same thoughts in each."""
_READ = frozenset({"role", "content", "tool_calls", "function_call", "refusal"})
_READ_OF_CALLS = frozenset({"index", "id", "type", "function"})
_RETURNED = "[The files that the tools returned]"
_NO_ORIGIN: Origin = ("", "")


def path(base_url: str) -> str:  # noqa: ARG001 (the other protocol's differs)
    return "/chat/completions"


def request_body(
    model: str, request: ModelRequest, quirks: Quirks = NO_QUIRKS, origin: Origin = _NO_ORIGIN
) -> dict[str, Any]:
    """The body of a streaming request to `/chat/completions`. Opaque parts are sent back to their `origin` only."""
    names = names_of(request)
    body: dict[str, Any] = {
        "model": model,
        "messages": list(_wire_messages(request, names, quirks, origin)),
        "stream": True,
        "stream_options": {"include_usage": True},
        **_options(request.settings),
    }
    if request.output is not None:
        form = {"name": "reply", "schema": request.output, "strict": _is_strict(request.output)}
        body[OUTPUT] = {"type": "json_schema", "json_schema": form}
    if request.tools:
        offered = _offered(request.settings.get("tool_choice"), names)
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": names.to_wire(each.name),
                    "description": each.description,
                    "parameters": acceptable(each.parameters),
                },
            }
            for each in request.tools
        ]
        body |= offered
        if "parallel_tool_calls" in request.settings:
            body["parallel_tool_calls"] = request.settings["parallel_tool_calls"]
    body |= request.settings.get("extra_body", {})
    return {quirks.renames.get(name, name): value for name, value in body.items() if _is_sent(name, quirks)}


def names_of(request: ModelRequest) -> WireNames:
    return WireNames(tool.name for tool in request.tools)


def _is_sent(name: str, quirks: Quirks) -> bool:
    return quirks.renames.get(name, name) not in quirks.omits


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    options = {wire: settings[name] for name, wire in _OPTIONS.items() if settings.get(name) is not None}
    thinking = settings.get("thinking")
    if thinking is False or isinstance(thinking, str):
        options.setdefault("reasoning_effort", thinking or "none")
    return options


def _offered(choice: Any, names: WireNames) -> dict[str, Any]:
    """The option `tool_choice` for the setting: `auto`, `none`, `required`, or the names of tools."""
    if choice is None or choice in ("auto", "none", "required"):
        return {} if choice is None else {"tool_choice": choice}
    functions = [{"type": "function", "function": {"name": names.to_wire(each)}} for each in _listed(choice)]
    if len(functions) == 1:
        return {"tool_choice": functions[0]}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": functions}}}


def _listed(choice: Any) -> list[str]:
    return [choice] if isinstance(choice, str) else list(choice)


_NOT_STRICT = frozenset(
    {"minLength", "maxLength", "uniqueItems", "patternProperties", "minProperties", "maxProperties"}
)
"""The members of a schema that OpenAI does not enforce, so that it refuses the schema if it is to."""


def _is_strict(schema: Any) -> bool:
    """Whether the provider can enforce `schema`: every object names and requires all its members.

    A property may have the name of a member of schemas.
    """
    if isinstance(schema, list):
        return all(map(_is_strict, schema))
    if not isinstance(schema, Mapping):
        return True
    if schema.keys() & _NOT_STRICT:
        return False
    if schema.get("type") == "object" or "properties" in schema:
        members = as_object(schema.get("properties"))
        if schema.get("additionalProperties") is not False or set(members) != set(schema.get("required", ())):
            return False
    named = [each for name in ("properties", "$defs") for each in as_object(schema.get(name)).values()]
    return all(
        map(_is_strict, [*named, *(each for name, each in schema.items() if name not in ("properties", "$defs"))])
    )


def _wire_messages(request: ModelRequest, names: WireNames, quirks: Quirks, origin: Origin) -> Iterator[dict[str, Any]]:
    ids = WireIds(quirks.ids or ANY_CHARACTERS)
    returned = list[Attachment]()
    for message in request.messages:
        if message.role is Role.TOOL:
            call_id = ids.of_result(message.tool_call_id or "")
            yield {"role": "tool", "tool_call_id": call_id, "content": message.content}
            returned += [each for each in message.files if each.media_type in quirks.reads]
            continue
        if returned:
            yield _returned(returned)
            returned = []
        sent = SentBefore.of(message, origin, quirks)
        wire: dict[str, Any] = {"role": message.role.value, "content": _content(message, quirks)}
        if message.tool_calls:
            wire_ids = ids.assign((call.id for call in message.tool_calls), sent.ids)
            wire |= quirks.message_members
            wire["tool_calls"] = [
                _wire_call(call, wire_ids[call.id], names) | sent.calls.get(call.id, dict(quirks.call_members))
                for call in message.tool_calls
            ]
        wire |= sent.message
        if "content" in sent.message:  # parts of the content that are no text
            text = [{"type": "text", "text": message.content}] if message.content else []
            wire["content"] = [*as_array(sent.message["content"]), *text]
        yield wire

    if returned:
        yield _returned(returned)


def _returned(files: Sequence[Attachment]) -> dict[str, Any]:
    """The files of tools' results, in a message of their own: a result is only text here."""
    return {"role": "user", "content": [{"type": "text", "text": _RETURNED}, *map(_file, files)]}


def _content(message: Message, quirks: Quirks) -> str | list[dict[str, Any]]:
    """The message's text, or its parts if it has files that the model reads."""
    pieces = message.pieces(quirks.reads)
    if not any(isinstance(each, Attachment) for each in pieces):
        return message.content
    return [{"type": "text", "text": each} if isinstance(each, str) else _file(each) for each in pieces]


def _file(file: Attachment) -> dict[str, Any]:
    url = f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}"
    if file.media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"filename": file.name or "file.pdf", "file_data": url}}


def _wire_call(call: ToolCall, wire_id: str, names: WireNames) -> dict[str, Any]:
    function = {"name": names.to_wire(call.name), "arguments": _wire_arguments(call.arguments)}
    return {"id": wire_id, "type": "function", "function": function}


def _wire_arguments(arguments: str) -> str:
    try:
        return arguments if untrusted.load_object(arguments) else "{}"
    except ValueError:
        return "{}"


def assembler(request: ModelRequest, quirks: Quirks, origin: Origin) -> ReplyAssembler:
    return ReplyAssembler(names_of(request), quirks, origin)


class ReplyAssembler:
    """Assembles a reply from the chunks of a stream."""

    def __init__(self, names: WireNames | None = None, quirks: Quirks = NO_QUIRKS, origin: Origin = _NO_ORIGIN) -> None:
        """`names` translates the tool names in the reply. By default, they stay as the model wrote them."""
        self._names = names or WireNames()
        self.draft = ReplyDraft(self._names, origin, quirks, ANY_CHARACTERS)
        self.complete = False
        """Always false: the stream's own end follows the reply's, after the usage."""
        self._by_index: dict[int, ToolCallDraft] = {}
        self._streams = False
        self._refused = False
        self._thoughts_in = ""

    def feed(self, chunk: Mapping[str, Any]) -> str:
        """Add one chunk and return its text.

        Raises:
            InvalidResponse: the reply is too long or has too many calls.
        """
        draft = self.draft
        draft.model = draft.model or as_string(chunk.get("model"))
        text = ""
        usage = chunk.get("usage") or as_object(chunk.get("x_groq")).get("usage")
        for choice in as_array(chunk.get("choices")):
            # A reply has one choice. Some servers send its text and its calls as two, without an index.
            if not isinstance(choice, dict) or choice.get("index"):
                continue
            usage = usage or choice.get("usage")
            draft.end(as_string(choice.get("finish_reason")))
            delta, message = choice.get("delta"), choice.get("message")
            if isinstance(delta, dict) and delta:
                self._streams = True
                text += self._add(delta, is_whole=False)
            elif isinstance(message, dict) and not self._streams:  # after deltas, the reply is repeated as a whole
                text += self._add(message, is_whole=True)
        if usage:
            draft.usage = _usage(as_object(usage)) or draft.usage
        return text

    def feed_whole(self, body: Mapping[str, Any]) -> str:
        """Add a reply that was not streamed, and return its text. Raises as `feed`."""
        return self.feed(body)

    def finish(self) -> tuple[str, ModelReply]:
        """The text that `feed` has not returned yet, and the complete reply.

        Raises:
            PerdureError: see `ReplyDraft.finish`.
        """
        if self._refused and self.draft.stop_reason:  # the provider itself ends a refusal with `stop`
            self.draft.stop_reason = endings.REFUSAL
        return self.draft.finish()

    def _add(self, delta: Mapping[str, Any], *, is_whole: bool) -> str:
        draft = self.draft
        content = delta.get("content")
        text = draft.add_text(content if isinstance(content, str) else self._text_of_parts(content))
        if len(delta) == 1 and content is not None:
            return text
        if refusal := as_string(delta.get("refusal")):
            self._refused = True
            text += draft.add_text(refusal)
        for name in _THOUGHTS:
            thoughts = delta.get(name)
            if thoughts and isinstance(thoughts, str) and self._thoughts_in in ("", name):
                self._thoughts_in = name
                draft.add_thoughts(thoughts)
        fragments = as_array(delta.get("tool_calls")) or [
            {"function": each} for each in [delta.get("function_call")] if isinstance(each, dict)
        ]
        for fragment in fragments:
            self._add_fragment(as_object(fragment), is_whole=is_whole)
        draft.keep(draft.members, {name: value for name, value in delta.items() if name not in _READ})
        return text

    def _text_of_parts(self, content: object) -> str:
        """The text of a content that is a list of parts. Thoughts, and parts of other kinds, are kept."""
        texts = []
        for part in as_array(content):
            if isinstance(part, str):
                texts.append(part)
            elif as_object(part).get("type", "text") == "text":
                texts.append(as_string(as_object(part).get("text")))
            else:
                self.draft.keep(self.draft.members, {"content": [part]})
                inner = part.get("thinking")
                for each in [inner] if isinstance(inner, str) else as_array(inner):
                    self.draft.add_thoughts(each if isinstance(each, str) else as_string(as_object(each).get("text")))
        return "".join(texts)

    def _add_fragment(self, fragment: Mapping[str, Any], *, is_whole: bool) -> None:
        function = as_object(fragment.get("function"))
        name = as_string(function.get("name"))
        given_id = as_string(fragment.get("id"))
        arguments = function.get("arguments")
        piece = json.dumps(arguments) if isinstance(arguments, dict) else as_string(arguments)
        call = self.draft.add_call() if is_whole else self._call_of(fragment.get("index"), given_id, name, piece)
        call.id = call.id or given_id
        self.draft.extend_call(call, name=name if name != call.name else "", arguments=piece)
        self.draft.keep(call.members, {key: each for key, each in fragment.items() if key not in _READ_OF_CALLS})

    def _call_of(self, index: object, given_id: str, name: str, piece: str) -> ToolCallDraft:
        """The call that a fragment belongs to: an earlier call or a new one.

        A fragment with an index begins a new call in three cases:

        - The index is new.
        - The fragment has a name, and its id differs from the id of the call with this index. Some servers give every
          call the index 0.
        - The fragment has a name but no id. Its name is that of another tool, or it has arguments although those of
          the call with this index are complete.

        A fragment without an index begins a new call in three cases:

        - Its id is new.
        - It has no id, and its name differs from the last call's name.
        - It has no id but a name, and the last call's arguments are complete.
        """
        calls = self.draft.calls
        if isinstance(index, int):
            call = self._by_index.get(index)
            if (
                call is None
                or (name and given_id and call.id and given_id != call.id)
                or (name and not given_id and (self._are_two_tools(call.name, name) or (piece and call.is_complete)))
            ):
                call = self._by_index[index] = self.draft.add_call()
            return call
        if not calls:
            return self.draft.add_call()
        last = calls[-1]
        if given_id:
            return next((call for call in calls if call.id == given_id), None) or self.draft.add_call()
        if name and (name != last.name or last.is_complete):
            return self.draft.add_call()
        return last

    def _are_two_tools(self, one: str, other: str) -> bool:
        """Whether these are the names of two tools, and not two pieces of one name."""
        return one != other and one in self._names and other in self._names


def _usage(usage: Mapping[str, Any]) -> Usage | None:
    read, written = as_count(usage.get("prompt_tokens")), as_count(usage.get("completion_tokens"))
    if read is None or written is None:
        return None
    cached = (
        as_object(usage.get("prompt_tokens_details")).get("cached_tokens"),
        usage.get("prompt_cache_hit_tokens"),
        usage.get("cached_tokens"),
    )
    thought = as_count(as_object(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    if thought and usage.get("total_tokens") == read + written + thought:  # xAI counts thoughts separately
        written += thought
    return Usage(read, written, next((each for each in map(as_count, cached) if each is not None), None), thought)
