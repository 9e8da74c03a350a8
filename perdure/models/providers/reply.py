"""Builds a reply from the parts of a stream, for every wire format.

The wire modules pass the text and the tool calls to a `ReplyDraft`. The draft limits the length of the reply, replaces
characters that PostgreSQL cannot store, and rejects an incomplete reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from perdure.errors import ContextTooLong, InvalidResponse
from perdure.models import endings
from perdure.models.protocol import ModelReply, ToolCall, Usage
from perdure.models.providers.wire_names import WireNames, make_unique
from perdure.text import untrusted

MAX_REPLY_CHARS = 2_000_000
"""Maximum characters of a reply: its text, and the names and arguments of its calls. A longer reply is rejected."""

MAX_TOOL_CALLS = 128
"""Maximum number of calls that providers allow in one message."""


@dataclass(slots=True)
class ToolCallDraft:
    """A tool call under construction."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class ReplyDraft:
    """A reply under construction. When `stop_reason` is set, the server has ended the reply.

    `overflowed`: the prompt and the reply together do not fit the model's context window.
    """

    def __init__(self, names: WireNames) -> None:
        """`names` translates the tool names in the reply."""
        self.model = ""
        self.stop_reason = ""
        self.overflowed = False
        self.usage: Usage | None = None
        self.calls: list[ToolCallDraft] = []
        self._names = names
        self._text: list[str] = []
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
        """Add text and return the part that can be shown. Holds back half a surrogate pair at the end of the text.

        Raises:
            InvalidResponse: the reply is too long.
        """
        if not text:
            return ""
        self._grow(text)
        text = self._held_back + text
        # A server that splits text by UTF-16 code units may split a surrogate pair.
        cut_at = len(text) - 1 if "\ud800" <= text[-1] <= "\udbff" else len(text)
        self._held_back = text[cut_at:]
        whole = untrusted.storable(text[:cut_at])
        self._text.append(whole)
        return whole

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
        self._grow(name + arguments)
        call.name += name
        if arguments:
            call.arguments.append(arguments)

    def finish(self) -> tuple[str, ModelReply]:
        """The text that `add_text` held back, and the complete reply.

        Raises:
            InvalidResponse: the stream ended early, or the reply has neither text nor a tool call.
            ContextTooLong, ContentFiltered, IncompleteReply, ProviderError: the reply is empty; see `endings.checked`.
        """
        if not self.stop_reason:
            raise InvalidResponse("The model's reply ended before it was finished.")
        rest = untrusted.storable(self._held_back)
        reply = ModelReply(
            content="".join(self._text) + rest,
            tool_calls=tuple(self._finished_calls()),
            usage=self.usage,
            model=untrusted.storable(self.model),
            stop_reason=untrusted.storable(endings.normalized(self.stop_reason)),
        )
        if not reply.content.strip() and not reply.tool_calls:
            if self.overflowed:
                raise ContextTooLong("The conversation does not fit the model's context window.")
            endings.checked(reply)
        return rest, reply

    def _finished_calls(self) -> Iterator[ToolCall]:
        used: set[str] = set()
        for number, call in enumerate(self.calls, start=1):
            yield ToolCall(
                id=make_unique(untrusted.storable(call.id) or f"call_{number}", used),
                name=untrusted.storable(self._names.from_wire(call.name)),
                arguments=untrusted.storable("".join(call.arguments)),
            )

    def _grow(self, text: str) -> None:
        self._size += len(text)
        if self._size > MAX_REPLY_CHARS:
            raise InvalidResponse(f"The model's reply is longer than {MAX_REPLY_CHARS:,} characters.")
