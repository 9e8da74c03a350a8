"""The Chat Completions wire format of prompts and streamed replies.

`request_body` converts every transcript to a request that providers accept. Replies are untrusted. Compatible servers
omit fields, and differ in how they split and repeat tool calls.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.models import endings
from perdure.models.notes import placed
from perdure.models.protocol import Attachment, Message, ModelReply, ModelRequest, Role, Usage
from perdure.models.providers.endpoint import CACHE_KEY, NO_QUIRKS, Quirks
from perdure.models.providers.json_values import as_array, as_count, as_object, as_string, object_in
from perdure.models.providers.reply import (
    EMPTY_TEXT,
    NO_ORIGIN,
    Origin,
    ReplyDraft,
    ToolCallDraft,
    Wire,
    names_of,
    sent_back,
)
from perdure.models.providers.wire_names import ANY_CHARACTERS, WireIds, WireNames
from perdure.models.schemas import offerable
from perdure.models.settings import NAMES

MAX_DESCRIPTION = 1_024
"""Maximum characters of a tool's description. OpenAI's servers refuse more, and so do those that pass requests on."""

OUTPUT = "response_format"
"""The option with the schema of the reply."""

_OPTIONS = (
    "temperature", "top_p", "max_tokens", "seed", "stop_sequences", "presence_penalty", "frequency_penalty",
    "logit_bias", "service_tier", "reasoning_effort",
)  # fmt: skip
"""The settings that are options of the request."""
_NAMES = {"stop_sequences": "stop"}
"""The names of options that are not those of the settings."""
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text", "thinking")
"""The members with thoughts. Servers that send several send the same thoughts in each."""
_READ = frozenset({"role", "content", "tool_calls", "function_call", "refusal"})
_READ_OF_CALLS = frozenset({"index", "id", "type", "function"})
_RETURNED = "[The files that the tools returned]"
_ACKNOWLEDGED = "OK."
"""The assistant's message between a tool's result and a user's message, for servers that require one."""


def request_body(
    model: str, request: ModelRequest, quirks: Quirks = NO_QUIRKS, origin: Origin = NO_ORIGIN
) -> dict[str, Any]:
    """The body of a streaming request to `/chat/completions`. Opaque parts are sent back to their `origin` only.

    The messages are last: what is the same in the next prompt stands before what is not.
    """
    names = names_of(request)
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_options(request.settings),
    }
    if quirks.caches and request.cache_key is not None:
        body[CACHE_KEY] = request.cache_key
    if request.output is not None:
        form = {"name": "reply", "schema": request.output, "strict": _is_strict(request.output)}
        body[OUTPUT] = {"type": "json_schema", "json_schema": form}
    if request.tools:
        tools = [offerable(each, MAX_DESCRIPTION) for each in request.tools]
        functions = [
            {"name": names.to_wire(each.name), "description": each.description, "parameters": each.parameters}
            for each in tools
        ]
        body["tools"] = [{"type": "function", "function": each} for each in functions]
        body |= _offered(request.settings, names)
    messages = _wire_messages(request, names, quirks, origin)
    body["messages"] = alternating(messages) if quirks.alternates else list(messages)
    body |= request.settings.get("extra_body", {})
    renamed = {quirks.renames.get(name, name): value for name, value in body.items()}
    return {name: value for name, value in renamed.items() if name not in quirks.omits}


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    options = {_NAMES.get(name, name): settings[name] for name in _OPTIONS if settings.get(name) is not None}
    thinking = settings.get("thinking")
    if thinking is False or isinstance(thinking, str):
        options.setdefault("reasoning_effort", thinking or "none")
    return options


def _offered(settings: Mapping[str, Any], names: WireNames) -> dict[str, Any]:
    """The options about tools. `tool_choice` is `auto`, `none`, `required`, or a list of tools' names."""
    offered = {
        name: settings[name] for name in ("tool_choice", "parallel_tool_calls") if settings.get(name) is not None
    }
    if isinstance(named := offered.get("tool_choice"), list | tuple):
        functions = [{"type": "function", "function": {"name": names.to_wire(each)}} for each in named]
        several = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": functions}}
        offered["tool_choice"] = functions[0] if len(functions) == 1 else several
    return offered


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
    prompt = placed(request.messages, within=quirks.notes_within or quirks.alternates)
    if prompt.system:
        yield {"role": Role.SYSTEM.value, "content": "\n\n".join(prompt.system)}
    for message in prompt.messages:
        wire: dict[str, Any] = {"role": message.role.value, "content": _content(message, quirks)}
        if message.role is Role.TOOL:
            yield {**wire, "tool_call_id": ids.of_result(message.tool_call_id)}
            returned += [each for each in message.files if each.media_type in quirks.reads]
            continue
        if returned:
            yield _returned(returned)
            returned = []
        members, calls = sent_back(message, ids, origin, quirks)
        if calls:
            wire |= {name: value for name, value in quirks.message_members.items() if name not in quirks.omits}
            wire["tool_calls"] = [
                {
                    "id": wire_id,
                    "type": "function",
                    "function": {
                        "name": names.to_wire(call.name),
                        "arguments": call.arguments if object_in(call.arguments) else "{}",
                    },
                    **own,
                }
                for call, wire_id, own in calls
            ]
        wire |= members
        if "content" in members:  # parts of the content that are no text
            text = [{"type": "text", "text": message.content}] if message.content else []
            wire["content"] = [*as_array(members["content"]), *text]
        yield wire

    if returned:
        yield _returned(returned)


def alternating(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""The messages for a server that refuses a user's message behind a tool's result or another user's message.

    A system message behind others becomes a user's message.

    >>> asked = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    >>> alternating([*asked, {"role": "tool", "content": "3"}, {"role": "user", "content": "four"}])[0::2]
    [{'role': 'user', 'content': 'one\n\ntwo'}, {'role': 'assistant', 'content': 'OK.'}]
    """
    found = list[dict[str, Any]]()
    for each in messages:
        before = found[-1]["role"] if found else Role.SYSTEM
        is_note = each["role"] == Role.SYSTEM and before != Role.SYSTEM
        message = {**each, "role": Role.USER.value} if is_note else each
        if message["role"] == before == Role.USER:
            found[-1] = {**found[-1], "content": _joined(found[-1]["content"], message["content"])}
            continue
        if message["role"] == Role.USER and before == Role.TOOL:
            found.append({"role": Role.ASSISTANT.value, "content": _ACKNOWLEDGED})
        found.append(message)
    return found


def _joined(one: Any, other: Any) -> Any:
    """The contents of two messages as that of one: a text, or parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    texts = [[{"type": "text", "text": each}] if isinstance(each, str) else as_array(each) for each in (one, other)]
    return [*texts[0], *texts[1]]


def unblanked(content: Any, *, calls: bool = False) -> Any:
    """A message's content for a server that refuses blank texts. `calls`: the message has calls, so it needs none."""
    if content is not None and not (isinstance(content, str) and not content.strip()):
        return content
    return None if calls else EMPTY_TEXT


def _returned(files: Sequence[Attachment]) -> dict[str, Any]:
    """The files of tools' results, in a message of their own: a result is only text here."""
    return {"role": "user", "content": [{"type": "text", "text": _RETURNED}, *map(_file, files)]}


def _content(message: Message, quirks: Quirks) -> str | list[dict[str, Any]] | None:
    """The message's text, or its parts if it has files that the model reads. A tool's files are in another message."""
    pieces = message.pieces(() if message.role is Role.TOOL else quirks.reads)
    if not any(isinstance(each, Attachment) for each in pieces):
        return unblanked(message.content, calls=bool(message.tool_calls)) if quirks.refuses_blanks else message.content
    return [{"type": "text", "text": each} if isinstance(each, str) else _file(each) for each in pieces]


def _file(file: Attachment) -> dict[str, Any]:
    url = f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}"
    if file.media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"filename": file.name or "file.pdf", "file_data": url}}


class ReplyAssembler(ReplyDraft):
    """Assembles a reply from the chunks of a stream. The stream's own end follows the reply's, after the usage."""

    def __init__(self, names: WireNames | None = None, quirks: Quirks = NO_QUIRKS, origin: Origin = NO_ORIGIN) -> None:
        super().__init__(names, quirks, origin)
        self._by_index: dict[int, ToolCallDraft] = {}
        self._streams = False
        self._refused = False
        self._thoughts_in = ""

    def feed(self, event: Mapping[str, Any]) -> str:
        """Add one chunk and return its text.

        Raises:
            InvalidResponse: the reply is too long or has too many calls.
        """
        self.model = self.model or as_string(event.get("model"))
        text = ""
        usage = event.get("usage") or as_object(event.get("x_groq")).get("usage")
        for choice in as_array(event.get("choices")):
            # A reply has one choice. Some servers send its text and its calls as two, without an index.
            if not isinstance(choice, dict) or choice.get("index"):
                continue
            usage = usage or choice.get("usage")
            self.end(as_string(choice.get("finish_reason")))
            delta, message = choice.get("delta"), choice.get("message")
            if isinstance(delta, dict) and delta:
                self._streams = True
                text += self._add(delta, is_whole=False)
            elif isinstance(message, dict) and not self._streams:  # after deltas, the reply is repeated as a whole
                text += self._add(message, is_whole=True)
        if usage:
            self.usage = _usage(as_object(usage)) or self.usage
        return text

    def finish(self) -> tuple[str, ModelReply]:
        """The text that `feed` has not returned yet, and the complete reply; see `ReplyDraft.finish`."""
        if self._refused and self.stop_reason:  # the provider itself ends a refusal with `stop`
            self.stop_reason = endings.REFUSAL
        return super().finish()

    def _add(self, delta: Mapping[str, Any], *, is_whole: bool) -> str:
        content = delta.get("content")
        text = self.add_text(content if isinstance(content, str) else self._text_of_parts(content))
        if len(delta) == 1 and content is not None:
            return text
        if refusal := as_string(delta.get("refusal")):
            self._refused = True
            text += self.add_text(refusal)
        for name in _THOUGHTS:
            thoughts = delta.get(name)
            if thoughts and isinstance(thoughts, str) and self._thoughts_in in ("", name):
                self._thoughts_in = name
                self.add_thoughts(thoughts)
        fragments = as_array(delta.get("tool_calls")) or [
            {"function": each} for each in [delta.get("function_call")] if isinstance(each, dict)
        ]
        for fragment in fragments:
            self.add_fragment(as_object(fragment), is_whole=is_whole)
        self.keep(self.members, {name: value for name, value in delta.items() if name not in _READ})
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
                self.keep(self.members, {"content": [part]})
                inner = part.get("thinking")
                for each in [inner] if isinstance(inner, str) else as_array(inner):
                    self.add_thoughts(each if isinstance(each, str) else as_string(as_object(each).get("text")))
        return "".join(texts)

    def add_fragment(self, fragment: Mapping[str, Any], *, is_whole: bool = False) -> ToolCallDraft:
        """Add a fragment of a call, or a whole call, and return the call.

        Raises:
            InvalidResponse: the reply is too long or has too many calls.
        """
        function = as_object(fragment.get("function"))
        name = as_string(function.get("name"))
        given_id = as_string(fragment.get("id")).removeprefix("null")  # Mistral's, after the first fragment
        arguments = function.get("arguments")
        piece = json.dumps(arguments) if isinstance(arguments, dict) else as_string(arguments)
        call = self.add_call() if is_whole else self._call_of(fragment.get("index"), given_id, name, piece)
        call.id = call.id or given_id
        self.extend_call(call, name=name if name != call.name else "", arguments=piece)
        self.keep(call.members, {key: each for key, each in fragment.items() if key not in _READ_OF_CALLS})
        return call

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
        calls = self.calls
        if isinstance(index, int):
            call = self._by_index.get(index)
            if (
                call is None
                or (name and given_id and call.id and given_id != call.id)
                or (name and not given_id and (self._are_two_tools(call.name, name) or (piece and call.is_complete)))
            ):
                call = self._by_index[index] = self.add_call()
            return call
        if not calls:
            return self.add_call()
        last = calls[-1]
        if given_id:
            return next((call for call in calls if call.id == given_id), None) or self.add_call()
        if name and (name != last.name or last.is_complete):
            return self.add_call()
        return last

    def _are_two_tools(self, one: str, other: str) -> bool:
        """Whether these are the names of two tools, and not two pieces of one name."""
        return one != other and one in self.names and other in self.names


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
    if thought and as_count(usage.get("total_tokens")) == read + written + thought:  # xAI counts thoughts separately
        written += thought
    return Usage(read, written, next((each for each in map(as_count, cached) if each is not None), None), thought)


WIRE = Wire(
    lambda _: "/chat/completions",
    required=frozenset({"model", "messages", "stream", "tools"}),
    settings=frozenset(NAMES) - {"top_k"},
    output=OUTPUT,
    request_body=request_body,
    assembler=ReplyAssembler,
)
