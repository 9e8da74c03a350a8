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

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.errors import InvalidResponse
from perdure.models import endings
from perdure.models.notes import Placed, placed
from perdure.models.protocol import Attachment, Message, ModelReply, ModelRequest, Role, Usage
from perdure.models.providers.endpoint import CACHE_MARK, NO_QUIRKS, Quirks
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
from perdure.models.providers.wire_names import PLAIN_CHARACTERS, WireIds, WireNames
from perdure.models.schemas import offerable, without_limits
from perdure.models.settings import NAMES

MAX_TOKENS = 16_384
"""Maximum tokens of a reply. Each request must contain a limit. All models of the provider accept this value."""

_OVERFLOWED = "model_context_window_exceeded"
_REFUSED = "refusal"
"""The provider's classifiers ended the reply. A refusal in the model's own words ends with `end_turn`."""

_READ_OF_CALLS = frozenset({"type", "id", "name", "input"})
_UNMARKED = frozenset({"thinking", "redacted_thinking"})
_READ_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")

Block = dict[str, Any]

OUTPUT = "output_config"
"""The option with the schema of the reply."""
_OPTIONS = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences")
"""The settings that are options of the request."""
_TIERS = {"auto": "auto", "default": "standard_only"}
_EFFORTS = {"minimal": "low"}
_CHOICES = {"auto": "auto", "none": "none", "required": "any"}


def request_body(
    model: str, request: ModelRequest, quirks: Quirks = NO_QUIRKS, origin: Origin = NO_ORIGIN
) -> dict[str, Any]:
    """The body of a streaming request to `/v1/messages`. Opaque parts are sent back to their `origin` only.

    Tools, system prompt and messages are in the order in which the provider caches a prompt.
    """
    names, prompt = names_of(request), placed(request.messages)
    spoken = list(_blocks(prompt.messages, names, quirks, origin))
    system: str | list[Block] = "\n\n".join(prompt.system)
    if system and quirks.caches and CACHE_MARK not in quirks.omits:
        system = [block for each in prompt.system for block in _text_blocks(each)]
        _mark(system, spoken, prompt, goes_on=bool(request.tools))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        **_options(request),
        **_tools(request, names),
        **({"system": system} if system else {}),
        "messages": _turns(spoken),
        **request.settings.get("extra_body", {}),
    }
    return {name: value for name, value in body.items() if name not in quirks.omits}


def _mark(system: list[Block], spoken: Sequence[tuple[str, list[Block]]], prompt: Placed, *, goes_on: bool) -> None:
    """Mark the ends of what later prompts begin with: at most four blocks, as the provider allows.

    These are the instructions with the tools, the whole system prompt, the messages of earlier turns, and, if the turn
    may have another step (`goes_on`), the whole prompt. The provider finds a prefix that an earlier prompt has marked.
    """
    ends = [system[:1], system[1:], _sendable(spoken[: prompt.lasting]), _sendable(spoken) if goes_on else []]
    for each in ends:
        if each:
            each[-1][CACHE_MARK] = {"type": "ephemeral"}


def _sendable(spoken: Sequence[tuple[str, list[Block]]]) -> list[Block]:
    """The blocks that may have a mark: thoughts may not."""
    return [block for _, blocks in spoken for block in blocks if block["type"] not in _UNMARKED]


def _options(request: ModelRequest) -> dict[str, Any]:
    settings = request.settings
    options = {name: settings[name] for name in _OPTIONS if settings.get(name) is not None}
    thinking = settings.get("reasoning_effort", settings.get("thinking"))
    output: dict[str, Any] = {}
    if thinking is not None:
        options["thinking"] = {"type": "disabled" if thinking in (False, "none") else "adaptive"}
    if isinstance(thinking, str) and thinking != "none":
        output["effort"] = _EFFORTS.get(thinking, thinking)
    if request.output is not None:
        output["format"] = {"type": "json_schema", "schema": without_limits(request.output)}
    if output:
        options[OUTPUT] = output
    if tier := _TIERS.get(settings.get("service_tier", "")):
        options["service_tier"] = tier
    return options


def _tools(request: ModelRequest, names: WireNames) -> dict[str, Any]:
    """The options `tools` and `tool_choice`. Of several chosen tools, only those are offered."""
    if not request.tools:
        # The provider requires definitions of all tools that the conversation calls. `tool_choice` forbids new calls.
        called = dict.fromkeys(names.to_wire(call.name) for message in request.messages for call in message.tool_calls)
        tools: list[Block] = [{"name": name, "input_schema": {"type": "object"}} for name in called]
        return {"tools": tools, "tool_choice": {"type": "none"}} if tools else {}
    tools = [
        {"name": names.to_wire(each.name), "description": each.description, "input_schema": each.parameters}
        for each in map(offerable, request.tools)
    ]
    choice = request.settings.get("tool_choice")
    wire: dict[str, Any] = {"type": _CHOICES.get(choice, choice)} if isinstance(choice, str) else {}
    if isinstance(choice, list | tuple):
        named = [names.to_wire(each) for each in choice]
        wire = {"type": "tool", "name": named[0]} if len(named) == 1 else {"type": "any"}
        tools = [each for each in tools if each["name"] in named] if len(named) > 1 else tools
    if request.settings.get("parallel_tool_calls") is False and choice != "none":
        wire = {"type": "auto", **wire, "disable_parallel_tool_use": True}
    return {"tools": tools, "tool_choice": wire} if wire else {"tools": tools}


def _blocks(
    messages: Sequence[Message], names: WireNames, quirks: Quirks, origin: Origin
) -> Iterator[tuple[str, list[Block]]]:
    """The role and the content blocks of each message."""
    ids = WireIds(quirks.ids or PLAIN_CHARACTERS)
    for message in messages:
        match message.role:
            case Role.TOOL:
                said = _content(message, quirks) if message.files else message.content
                content = {"content": said} if message.content.strip() else {}
                result = {"type": "tool_result", "tool_use_id": ids.of_result(message.tool_call_id), **content}
                yield "user", [result]
            case Role.USER | Role.SYSTEM:
                yield "user", _content(message, quirks) or _text_blocks(EMPTY_TEXT)
            case Role.ASSISTANT:
                members, sent = sent_back(message, ids, origin, quirks)
                calls = [
                    {
                        "type": "tool_use",
                        "id": wire_id,
                        "name": names.to_wire(call.name),
                        "input": object_in(call.arguments),
                        **own,
                    }
                    for call, wire_id, own in sent
                ]
                yield "assistant", _in_order(as_array(members.get("blocks")), message.content, calls)


def _in_order(kept: Sequence[Block], content: str, calls: Sequence[Block]) -> list[Block]:
    """The blocks of a reply as the provider sent them: those in `kept`, with the text and the calls in their places.

    A block that `kept` has only for its place is of type `text`, with its length, or `tool_use`.
    """
    blocks, rest, at = list[Block](), list(calls), 0
    for block in map(as_object, kept):
        match block.get("type"):
            case "tool_use":
                blocks += rest[:1]
                rest = rest[1:]
            case "text":
                length = as_count(block.get("length")) or 0
                blocks += _text_blocks(content[at : at + length])
                at += length
            case str():
                blocks.append(dict(block))
            case _:
                pass  # of another adapter
    return [*blocks, *_text_blocks(content[at:]), *rest]


def _turns(spoken: Iterable[tuple[str, list[Block]]]) -> list[dict[str, Any]]:
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
    return {"role": "user", "content": _text_blocks(EMPTY_TEXT)}


def _text_blocks(content: str) -> list[Block]:
    return [{"type": "text", "text": content}] if content.strip() else []


def _content(message: Message, quirks: Quirks) -> list[Block]:
    pieces = message.pieces(quirks.reads)
    return [{"type": "text", "text": each} if isinstance(each, str) else _file(each) for each in pieces]


def _file(file: Attachment) -> Block:
    source = {"type": "base64", "media_type": file.media_type, "data": base64.b64encode(file.data).decode()}
    if file.media_type.startswith("image/"):
        return {"type": "image", "source": source}
    return {"type": "document", "source": source, **({"title": file.name} if file.name else {})}


class ReplyAssembler(ReplyDraft):
    """Assembles a reply from the events of a stream. The last event sets `complete`."""

    ID_FORM = PLAIN_CHARACTERS

    def __init__(self, names: WireNames | None = None, quirks: Quirks = NO_QUIRKS, origin: Origin = NO_ORIGIN) -> None:
        super().__init__(names, quirks, origin)
        self._open: dict[object, tuple[Block | None, ToolCallDraft]] = {}
        """The latest block of each index, if it is kept, and its call or input, which is streamed like a call's."""
        self._unstreamed: list[tuple[ToolCallDraft, str]] = []
        self._empty: set[object] = set()
        """The indexes of calls with an empty piece of arguments.

        The provider streams the arguments `{}` as one empty piece, and then ends the block.
        """
        self._blocks: list[Block] = []
        """The blocks in their order, as `_in_order` reads them."""
        self._kept: list[tuple[Block, ToolCallDraft]] = []
        self._counts: dict[str, int] = {}

    def feed(self, event: Mapping[str, Any]) -> str:
        match event.get("type"):
            case "message_start":
                message = as_object(event.get("message"))
                self.model = as_string(message.get("model"))
                self._count(message)
            case "content_block_start":
                return self._begin(_key(event.get("index")), as_object(event.get("content_block")))
            case "content_block_delta":
                return self._continue(_key(event.get("index")), as_object(event.get("delta")))
            case "content_block_stop" if (key := _key(event.get("index"))) in self._empty:
                self._unstreamed.append((self._open[key][1], "{}"))
            case "message_delta":
                self.end(as_string(as_object(event.get("delta")).get("stop_reason")))
                self._count(event)
            case "message_stop":
                self.complete = True
            case _:
                pass  # the provider may add new types of events
        return ""

    def feed_whole(self, body: Mapping[str, Any]) -> str:
        """Add a reply that was not streamed, and return its text. Raises as `feed`."""
        text = self.feed({"type": "message_start", "message": body})
        for index, block in enumerate(as_array(body.get("content"))):
            text += self.feed({"type": "content_block_start", "index": index, "content_block": block})
        self.feed({"type": "message_delta", "delta": body, "usage": body.get("usage")})
        return text

    def finish(self) -> tuple[str, ModelReply]:
        """The text that `feed` has not returned yet, and the complete reply; see `ReplyDraft.finish`."""
        for call, arguments in self._unstreamed:
            if not call.arguments:
                self.extend_call(call, arguments=arguments)
        self.overflowed = self.stop_reason == _OVERFLOWED
        if self.stop_reason == _REFUSED:
            self.stop_reason = endings.CONTENT_FILTER
        for block, given in self._kept:
            if whole := given.whole_arguments():
                block["input"] = object_in(whole)
            self.members["blocks"] = self._blocks
        return super().finish()

    def _begin(self, key: object, block: Mapping[str, Any]) -> str:
        match block.get("type"):
            case "text":
                return self._add_text(as_string(block.get("text")))
            case "tool_use":
                call = self.add_call()
                self._open[key] = None, call  # some servers give each block the same index
                call.id = as_string(block.get("id"))
                self.extend_call(call, name=as_string(block.get("name")))
                self.keep(call.members, {name: each for name, each in block.items() if name not in _READ_OF_CALLS})
                self._blocks.append({"type": "tool_use"})
                if whole_input := as_object(block.get("input")):  # from servers that do not stream arguments
                    self._unstreamed.append((call, json.dumps(whole_input)))
            case None:
                pass
            case _:  # thinking, and the provider's own tools
                kept, given = self._open[key] = dict(block), ToolCallDraft()
                self._kept.append((kept, given))
                self._blocks.append(kept)
                self.add_thoughts(as_string(block.get("thinking")))
        return ""

    def _continue(self, key: object, delta: Mapping[str, Any]) -> str:
        kept, call = self._open.get(key, (None, None))
        match delta.get("type"):
            case "text_delta":
                return self._add_text(as_string(delta.get("text")))
            case "input_json_delta":
                if call is None:
                    raise InvalidResponse("The model's server sent arguments that belong to no tool call.")
                self.extend_call(call, arguments=as_string(delta.get("partial_json")))
                if delta.get("partial_json") == "":
                    self._empty.add(key)
            case _ if kept is not None:
                self.keep(kept, {name: each for name, each in delta.items() if name != "type"})
                self.add_thoughts(as_string(delta.get("thinking")))
            case _:
                pass
        return ""

    def _add_text(self, piece: str) -> str:
        before = self.text_length
        text = self.add_text(piece)
        if not self._blocks or self._blocks[-1]["type"] != "text":
            self._blocks.append({"type": "text", "length": 0})
        self._blocks[-1]["length"] += self.text_length - before
        return text

    def _count(self, holder: Mapping[str, Any]) -> None:
        """Update the token counts. The provider's counts are cumulative, so later counts replace earlier ones.

        Smaller ones do not: some servers end a reply with zeros. A server may divide the tokens of the prompt in
        another way at the end, so their sum decides.
        """
        usage = as_object(holder.get("usage"))
        given = {**usage, **as_object(usage.get("output_tokens_details"))}
        later = {name: count for name, each in given.items() if (count := as_count(each)) is not None}
        if _read_tokens({**self._counts, **later}) < _read_tokens(self._counts):
            later = {name: count for name, count in later.items() if name not in _READ_COUNTS}
        for name, count in later.items():
            self._counts[name] = count if name in _READ_COUNTS else max(count, self._counts.get(name, 0))
        if "output_tokens" in self._counts and any(each in self._counts for each in _READ_COUNTS):
            self.usage = Usage(
                input_tokens=_read_tokens(self._counts),
                output_tokens=self._counts["output_tokens"],
                cached_tokens=self._counts.get("cache_read_input_tokens"),
                reasoning_tokens=self._counts.get("thinking_tokens"),
            )


def _read_tokens(counts: Mapping[str, int]) -> int:
    return sum(counts.get(each, 0) for each in _READ_COUNTS)


def _key(index: object) -> object:
    return index if isinstance(index, int) else None


WIRE = Wire(
    lambda base_url: "/messages" if base_url.rstrip("/").endswith("/v1") else "/v1/messages",
    required=frozenset({"model", "messages", "stream", "tools", "system", "max_tokens"}),
    settings=frozenset(NAMES) - {"seed", "presence_penalty", "frequency_penalty", "logit_bias"},
    output=OUTPUT,
    request_body=request_body,
    assembler=ReplyAssembler,
    headers={"anthropic-version": "2023-06-01"},
)
