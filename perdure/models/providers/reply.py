"""What all protocols share: the parts of a reply that go back to the provider, and the assembly of a streamed reply.

The wire modules pass the text, the thoughts, the tool calls and the opaque parts to a `ReplyDraft`. The draft limits
the length of the reply, replaces characters that PostgreSQL cannot store, separates thoughts from text, and rejects an
incomplete reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from perdure.errors import ContextTooLong, InvalidResponse
from perdure.models import endings
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Opaque, ToolCall, Usage
from perdure.models.providers.endpoint import NO_QUIRKS, Quirks
from perdure.models.providers.json_values import as_array, as_object, as_string
from perdure.models.providers.wire_names import ANY_CHARACTERS, IdForm, WireIds, WireNames, make_unique
from perdure.models.thoughts import ThoughtTags
from perdure.text import untrusted

MAX_REPLY_CHARS = 2_000_000
"""Maximum characters of a reply: its text and thoughts, and the names and arguments of its calls."""

MAX_TOOL_CALLS = 128
"""Maximum number of calls that providers allow in one message."""

REST_S = 5.0
"""Maximum seconds from the end of a reply to the end of its stream. The usage may come between them."""

_MOST_ENCODINGS = 3
_NO_ARGUMENTS = ("{}", "null", '""')
"""What some servers send as arguments before the arguments."""

EMPTY_TEXT = "(nothing)"
"""In place of a blank text, which some providers refuse."""

Origin: TypeAlias = tuple[str, str]
"""The endpoint and the model family that a reply comes from, and to which its opaque parts may return."""


NO_ORIGIN: Origin = ("", "")


@dataclass(frozen=True, slots=True)
class Wire:
    """A protocol. `required` are the options that every request has, and `settings` those that agents may set.

    `output` is the option with the schema of the reply. `path` is the path of requests at a base URL. `request_body`
    creates a request that asks for a stream.
    """

    path: Callable[[str], str]
    required: frozenset[str]
    settings: frozenset[str]
    output: str
    request_body: Callable[[str, ModelRequest, Quirks, Origin], dict[str, Any]]
    assembler: type[ReplyDraft]
    headers: Mapping[str, str] = field(default_factory=dict)


def names_of(request: ModelRequest) -> WireNames:
    return WireNames(tool.name for tool in request.tools)


def sent_back(
    message: Message, ids: WireIds, origin: Origin, quirks: Quirks
) -> tuple[dict[str, Any], list[tuple[ToolCall, str, dict[str, Any]]]]:
    """What the server gets back of a reply: the opaque members of its message, and each call with its id and members.

    Replies of other providers have no such members, except those that the server requires of every call.
    """
    opaque = message.opaque
    is_own = opaque is not None and not quirks.forgets and opaque.is_from(*origin)
    parts: Mapping[str, Any] = opaque.parts if opaque is not None and is_own else {}
    # By position, because a transcript gives calls other ids if they repeat within a turn.
    kept = [parts.get("message"), *as_array(parts.get("calls")), *[quirks.call_members] * len(message.tool_calls)]
    members, *of_calls = [
        {name: value for name, value in as_object(each).items() if name not in quirks.omits}
        for each in kept[: 1 + len(message.tool_calls)]
    ]
    own = [as_string(each.pop("id", "")) for each in of_calls]
    if quirks.translates_own_ids:
        own = [""] * len(own)
    assigned = [ids.assign(call.id, each) for call, each in zip(message.tool_calls, own, strict=True)]
    return members, list(zip(message.tool_calls, assigned, of_calls, strict=True))


@dataclass(slots=True, eq=False)
class ToolCallDraft:
    """A tool call under construction. `members` are the members of the provider's call that perdure does not read."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    members: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are a JSON object, to which nothing can be appended."""
        return bool(self.arguments) and self.arguments[-1].endswith("}") and _is_object("".join(self.arguments))

    def whole_arguments(self) -> str:
        """The arguments. Of a server that repeats what it has already sent in later pieces, its last piece.

        Empty arguments before the arguments are left out: `{}{"city": "Rome"}` are `{"city": "Rome"}`.
        """
        whole = _decoded("".join(self.arguments))
        if _is_object(whole):
            return whole
        for empty in _NO_ARGUMENTS:
            if whole.startswith(empty) and _is_object(rest := _decoded(whole[len(empty) :])):
                return rest
        *before, last = self.arguments or [""]
        grows = all(later.startswith(earlier) for earlier, later in zip(before, self.arguments[1:], strict=True))
        return last if _is_object(last) and (grows or "".join(before) == last) else whole


def rest_s(call: ModelCall) -> float:
    """Seconds to wait, at the end of a reply, for what may follow it. Some time of the call is left after them.

    Raises:
        CallAborted, DeadlineExceeded: the call is over.
    """
    return min(REST_S, call.remaining() / 2)


def _decoded(text: str) -> str:
    """The JSON in `text`, of servers that encode it as JSON again."""
    for _ in range(_MOST_ENCODINGS):
        if not text.startswith('"'):
            break
        try:
            text = as_string(json.loads(text))
        except ValueError:
            break
    return text


def _is_object(text: str) -> bool:
    try:
        untrusted.load_object(text)
    except ValueError:
        return False
    return bool(text.strip())


class ReplyDraft:
    """A reply under construction. When `stop_reason` is set, the server has ended the reply.

    `complete`: the stream has ended. `overflowed`: the prompt and the reply together do not fit the model's context
    window. `members` are the members of the provider's message that perdure does not read. `size`: the characters of
    the reply so far.
    """

    ID_FORM: ClassVar[IdForm] = ANY_CHARACTERS
    """The form of call ids that the protocol accepts."""

    def __init__(self, names: WireNames | None = None, quirks: Quirks = NO_QUIRKS, origin: Origin = NO_ORIGIN) -> None:
        """`names` translates the tool names in the reply. By default, they stay as the model wrote them."""
        self.complete = False
        self.model = ""
        self.stop_reason = ""
        self.overflowed = False
        self.usage: Usage | None = None
        self.calls: list[ToolCallDraft] = []
        self.members: dict[str, Any] = {}
        self.text_length = 0
        self.names = names or WireNames()
        self._origin = origin
        self._ids = quirks.ids or self.ID_FORM
        self._tags = ThoughtTags(thinks_first=quirks.thinks_first)
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._held_back = ""
        self.size = 0

    def feed(self, event: Mapping[str, Any]) -> str:
        """Add one event of a stream, and return its text.

        Raises:
            InvalidResponse: the event is malformed, or the reply is too long or has too many calls.
        """
        raise NotImplementedError

    def feed_whole(self, body: Mapping[str, Any]) -> str:
        """Add a reply that was not streamed, and return its text. Raises as `feed`."""
        return self.feed(body)

    def end(self, reason: str) -> None:
        """Note why the server ends the reply. A proper end does not replace an improper one: the reply was cut off.

        Some servers write `null` as a string in every chunk but the last.
        """
        if reason in ("", "null") or (
            self.stop_reason and endings.is_proper(reason) and not endings.is_proper(self.stop_reason)
        ):
            return
        self.stop_reason = reason

    def add_text(self, text: str) -> str:
        """Add text, which may begin with thoughts in tags, and return the part that can be shown.

        Raises:
            InvalidResponse: the reply is too long.
        """
        if not text:
            return ""
        self._grow(len(text))
        thoughts, text = self._tags.split(text)
        self._thoughts.append(thoughts)
        return self._shown(text)

    def close_thoughts(self) -> str:
        """End the thoughts in tags, if they have not ended, and return the text that can be shown."""
        thoughts, text = self._tags.close()
        self._thoughts.append(thoughts)
        return self._shown(text)

    def add_thoughts(self, thoughts: str) -> None:
        """Add thoughts, which are no part of the text.

        Raises:
            InvalidResponse: the reply is too long.
        """
        if thoughts:
            self._grow(len(thoughts))
            self._thoughts.append(thoughts)

    def add_call(self) -> ToolCallDraft:
        """Begin a tool call.

        Raises:
            InvalidResponse: the message has too many calls.
        """
        if len(self.calls) == MAX_TOOL_CALLS:
            raise InvalidResponse(f"The model asked for more than {MAX_TOOL_CALLS} tool calls at once.")
        self.calls.append(ToolCallDraft())
        return self.calls[-1]

    def extend_call(self, call: ToolCallDraft, *, name: str = "", arguments: str = "") -> None:
        """Append to the name of a call, to its arguments, or to both.

        Raises:
            InvalidResponse: the reply is too long.
        """
        self._grow(len(name) + len(arguments))
        call.name += name
        if arguments:
            call.arguments.append(arguments)

    def keep(self, kept: dict[str, Any], members: Mapping[str, Any]) -> None:
        """Add the next pieces of opaque `members` to those in `kept`; see `merged`.

        Raises:
            InvalidResponse: the reply is too long.
        """
        for name, piece in members.items():
            if piece not in _NOTHING:
                self._grow(len(piece) if isinstance(piece, str) else 1)
                kept[name] = merged(kept.get(name), piece, name)

    def finish(self) -> tuple[str, ModelReply]:
        """The text that `add_text` held back, and the complete reply.

        Raises:
            InvalidResponse: the stream ended early, or the reply has neither text nor a tool call.
            ContextTooLong, ContentFiltered, IncompleteReply, ProviderError: the reply is empty; see `endings.checked`.
        """
        if not self.stop_reason:
            raise InvalidResponse("The model's reply ended before it was finished.")
        is_proper = endings.is_proper(self.stop_reason) and not self.calls
        thoughts, text, in_doubt = self._tags.finish(is_proper=is_proper)
        all_thoughts = "".join([*self._thoughts, thoughts])
        rest = self._shown(text) + untrusted.storable(self._held_back)
        calls, opaque = self._finished_calls()
        reply = ModelReply(
            content="".join(self._text) + untrusted.storable(self._held_back),
            tool_calls=calls,
            usage=self.usage,
            model=untrusted.storable(self.model),
            stop_reason=untrusted.storable(endings.normalized(self.stop_reason)),
            thoughts=untrusted.storable(all_thoughts[: len(all_thoughts) - in_doubt]).strip(),
            opaque=opaque,
        )
        if not reply.content.strip() and not reply.tool_calls:
            if self.overflowed:
                raise ContextTooLong("The conversation does not fit the model's context window.")
            endings.checked(reply)
        return rest, reply

    def _shown(self, text: str) -> str:
        """Add text without thoughts, and return it. Holds back half a surrogate pair at the end of the text."""
        text = self._held_back + text
        if not text:
            return ""
        # A server that splits text by UTF-16 code units may split a surrogate pair.
        cut_at = len(text) - 1 if "\ud800" <= text[-1] <= "\udbff" else len(text)
        self._held_back = text[cut_at:]
        whole = untrusted.storable(text[:cut_at])
        self._text.append(whole)
        self.text_length += len(whole)
        return whole

    def _finished_calls(self) -> tuple[tuple[ToolCall, ...], Opaque | None]:
        used: set[str] = set()
        finished: list[ToolCall] = []
        members: list[dict[str, Any]] = []
        for number, call in enumerate(self.calls, start=1):
            call_id = make_unique(untrusted.storable(call.id) or f"call_{number}", used)
            name, arguments = self.names.from_wire(call.name), call.whole_arguments()
            finished.append(ToolCall(call_id, untrusted.storable(name), untrusted.storable(arguments)))
            if call.id and not (call.id == call_id and self._ids.accepts(call_id)):
                call.members["id"] = call.id
            members.append(call.members)
        kept = {"message": self.members, "calls": members if any(members) else []}
        parts = {name: each for name, each in kept.items() if each}
        return tuple(finished), Opaque(*self._origin, _storable(parts)) if parts else None

    def _grow(self, characters: int) -> None:
        self.size += characters
        if self.size > MAX_REPLY_CHARS:
            raise InvalidResponse(f"The model's reply is longer than {MAX_REPLY_CHARS:,} characters.")


_TEXT_MEMBERS = frozenset({"reasoning_content", "reasoning", "thinking", "text", "summary", "data", "partial_json"})
"""Members whose pieces are appended to each other. Of other texts, the last piece is the whole."""


_NOTHING: tuple[object, ...] = (None, "", [], {})


class _Pieces(list[str]):
    """The pieces of a text that is being appended to."""


def merged(before: Any, piece: Any, name: str = "") -> Any:
    """The value of an opaque member after its next piece: objects and lists grow in place, and texts are appended.

    An item of a list continues the last one if both have the same `type` and `index`, until a signature ends it.
    """
    match before, piece:
        case _Pieces(), str():
            before.append(piece)
            return before
        case str(), str() if name in _TEXT_MEMBERS:
            return _Pieces((before, piece))
        case dict(), dict():
            before.update({key: merged(before.get(key), each, key) for key, each in piece.items() if each is not None})
            return before
        case list(), list():
            for each in piece:
                if before and _continues(before[-1], each):
                    merged(before[-1], each)
                else:
                    before.append(each)
            return before
        case _:
            return piece


def _continues(last: Any, item: Any) -> bool:
    if not isinstance(last, dict) or not isinstance(item, dict) or last.get("signature"):
        return False
    if any(last.get(key) != item.get(key) for key in ("type", "index")):
        return False
    return item.get("index") is not None or bool(last.keys() & item.keys() & {"text", "thinking", "summary"})


def _storable(value: Any) -> Any:
    match value:
        case _Pieces():
            return untrusted.storable("".join(value))
        case str():
            return untrusted.storable(value)
        case dict():
            return {untrusted.storable(key): _storable(each) for key, each in value.items()}
        case list():
            return [_storable(each) for each in value]
        case float() if value - value != 0.0:  # JSON has neither infinity nor NaN
            return None
        case _:
            return value
