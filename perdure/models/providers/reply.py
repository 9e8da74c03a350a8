"""Builds a reply from the parts of a stream, for every wire format.

The wire modules pass the text, the thoughts, the tool calls and the opaque parts to a `ReplyDraft`. The draft limits
the length of the reply, replaces characters that PostgreSQL cannot store, separates thoughts from text, and rejects an
incomplete reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from perdure.errors import ContextTooLong, InvalidResponse
from perdure.models import endings
from perdure.models.protocol import Message, ModelReply, Opaque, ToolCall, Usage
from perdure.models.providers.endpoint import Quirks
from perdure.models.providers.json_values import as_array, as_object
from perdure.models.providers.wire_names import IdForm, WireNames, make_unique
from perdure.models.thoughts import ThoughtTags
from perdure.text import untrusted

MAX_REPLY_CHARS = 2_000_000
"""Maximum characters of a reply: its text and thoughts, and the names and arguments of its calls."""

MAX_TOOL_CALLS = 128
"""Maximum number of calls that providers allow in one message."""

Origin: TypeAlias = tuple[str, str]
"""The endpoint and the model family that a reply comes from, and to which its opaque parts may return."""


@dataclass(frozen=True, slots=True)
class SentBefore:
    """What a provider sent with one of its replies, as it may be sent back.

    `message` has the members of its message, `calls` those of its calls and `ids` its own ids of calls, by perdure's
    ids. All are empty for the replies of other providers.
    """

    message: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Message, origin: Origin, quirks: Quirks) -> Self:
        opaque = message.opaque
        if opaque is None or quirks.forgets or not opaque.is_from(*origin):
            return cls()
        sent = cls(_left(opaque.parts.get("message"), quirks))
        # By position, because a transcript gives calls other ids if they repeat within a turn.
        for call, members in zip(message.tool_calls, as_array(opaque.parts.get("calls")), strict=False):
            sent.calls[call.id] = _left(members, quirks)
            if (own := sent.calls[call.id].pop("id", None)) and not quirks.translates_own_ids:
                sent.ids[call.id] = own
        return sent


def _left(members: object, quirks: Quirks) -> dict[str, Any]:
    return {name: value for name, value in as_object(members).items() if name not in quirks.omits}


@dataclass(slots=True)
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
        """The arguments. Of a server that repeats what it has already sent in later pieces, its last piece."""
        whole = "".join(self.arguments)
        if len(self.arguments) == 1 or _is_object(whole):
            return whole
        *before, last = self.arguments or [""]
        grows = all(later.startswith(earlier) for earlier, later in zip(before, self.arguments[1:], strict=True))
        return last if _is_object(last) and (grows or "".join(before) == last) else whole


def _is_object(text: str) -> bool:
    try:
        untrusted.load_object(text)
    except ValueError:
        return False
    return bool(text.strip())


class ReplyDraft:
    """A reply under construction. When `stop_reason` is set, the server has ended the reply.

    `overflowed`: the prompt and the reply together do not fit the model's context window. `members` are the members of
    the provider's message that perdure does not read. `fresh_thoughts` are the thoughts since they were last taken.
    """

    def __init__(self, names: WireNames, origin: Origin, quirks: Quirks, ids: IdForm) -> None:
        """`names` translates the tool names in the reply. `ids` is the form of ids that the protocol accepts."""
        self.model = ""
        self.stop_reason = ""
        self.overflowed = False
        self.usage: Usage | None = None
        self.calls: list[ToolCallDraft] = []
        self.members: dict[str, Any] = {}
        self.fresh_thoughts = ""
        self.text_length = 0
        self._names = names
        self._origin = origin
        self._ids = quirks.ids or ids
        self._tags = ThoughtTags(thinks_first=quirks.thinks_first)
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._held_back = ""
        self._size = 0

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
        if thoughts:
            self._add_thoughts(thoughts)
        return self._shown(text)

    def add_thoughts(self, thoughts: str) -> None:
        """Add thoughts, which are no part of the text.

        Raises:
            InvalidResponse: the reply is too long.
        """
        if thoughts:
            self._grow(len(thoughts))
            self._add_thoughts(thoughts)

    def take_thoughts(self) -> str:
        """The thoughts that were added since the last call of this method."""
        fresh, self.fresh_thoughts = self.fresh_thoughts, ""
        return untrusted.storable(fresh)

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
        thoughts, text = self._tags.rest()
        self._add_thoughts(thoughts)
        if self._tags.is_unopened and not self._text and not self.calls and endings.is_proper(self.stop_reason):
            # The model has answered without thinking, so that no closing tag came.
            text, self._thoughts, self.fresh_thoughts = "".join(self._thoughts), [], ""
        rest = self._shown(text) + untrusted.storable(self._held_back)
        calls, opaque = self._finished_calls()
        reply = ModelReply(
            content="".join(self._text) + untrusted.storable(self._held_back),
            tool_calls=calls,
            usage=self.usage,
            model=untrusted.storable(self.model),
            stop_reason=untrusted.storable(endings.normalized(self.stop_reason)),
            thoughts=untrusted.storable("".join(self._thoughts)).strip(),
            opaque=opaque,
        )
        if not reply.content.strip() and not reply.tool_calls:
            if self.overflowed:
                raise ContextTooLong("The conversation does not fit the model's context window.")
            endings.checked(reply)
        return rest, reply

    def _add_thoughts(self, thoughts: str) -> None:
        self._thoughts.append(thoughts)
        self.fresh_thoughts += thoughts

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
            name, arguments = self._names.from_wire(call.name), call.whole_arguments()
            finished.append(ToolCall(call_id, untrusted.storable(name), untrusted.storable(arguments)))
            if call.id and not (call.id == call_id and self._ids.accepts(call_id)):
                call.members["id"] = call.id
            members.append(call.members)
        parts = {
            **({"message": self.members} if self.members else {}),
            **({"calls": members} if any(members) else {}),
        }
        return tuple(finished), Opaque(*self._origin, _storable(parts)) if parts else None

    def _grow(self, characters: int) -> None:
        self._size += characters
        if self._size > MAX_REPLY_CHARS:
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
