"""Repairs requests and replies where a server differs from what pydantic-ai or an SDK expects.

    what the server does                                 what is done
    refuses an option, such as `stream_options`          the option is left out, now and later (`of_refusal`)

The other repairs are those of servers that speak Chat Completions, for every path that ends in `/chat/completions`.

    refuses an assistant message with `content: null`    it gets an empty string
    answers with an empty stream                         it is asked for a reply without a stream
    refuses to stream                                    the same, now and later
    gives parallel calls one index                       each call gets its own
    names a call only in its first fragment              the others get an empty name, which Mistral's SDK requires
    refuses blank texts                                  calls have none, and others say that there is nothing
    refuses the order of the messages' roles             users' messages are joined, and follow no tool's result
    sends `null` as an event                             it is left out
    sends a complete JSON body instead of a stream       it becomes a stream of one event
    sends an error object in a stream                    it becomes perdure's error of it

All of it happens between the SDK and the server. What the server means is read as on perdure's own wire.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure.clock import Clock
from perdure.models.providers.chat_wire import WIRE, ReplyAssembler, alternating, unblanked
from perdure.models.providers.endpoint import Adaptation, Quirks, adapted
from perdure.models.providers.errors import ProviderFailure, Refusal, failure_in, reports_failure
from perdure.models.providers.json_values import as_array, as_object, as_string, documents
from perdure.models.providers.model import BLANK, without_stream
from perdure.models.providers.wire_names import WireNames

_PATH = "/chat/completions"
_NULLS = (b'"content": null', b'"content":null')
_REPAIRED = (b"tool_calls", b'"error"', b'"base_resp"', b"data: null", b"data:null")
"""What the lines have that are repaired, or that report an error."""
_PROMPTS = frozenset({"messages", "input"})
"""The members with the prompt: of Chat Completions and Messages, and of the Responses API."""
_REQUIRED = WIRE.required | {"system", "input", "instructions"}


@dataclass(slots=True)
class Repairs:
    """The repairs of one exchange. `quirks` has what the server has refused."""

    quirks: Quirks
    clock: Clock
    is_chat: bool = False
    """Whether the latest request is one of Chat Completions."""

    def of_request(self, path: str, content: bytes, *, is_whole: bool) -> bytes | None:
        """The repaired body of a request; `None` if nothing is to be repaired. `is_whole`: it asks for no stream."""
        self.is_chat = path.endswith(_PATH)
        is_null = self.is_chat and any(null in content for null in _NULLS)
        of_messages = is_null or (self.is_chat and (self.quirks.refuses_blanks or self._alternates))
        if not (is_whole or of_messages or self.quirks.omits or self.quirks.renames):
            return None
        body = json.loads(content)
        if of_messages:
            body["messages"] = self._repaired_messages(body["messages"])
        for message in body.get("messages", ()):
            for part in (message, *message.get("tool_calls", ())):
                for name in self.quirks.omits.intersection(part):
                    del part[name]
        renamed = {self.quirks.renames.get(name, name): value for name, value in body.items()}
        sent = {name: value for name, value in renamed.items() if name not in self.quirks.omits}
        if is_whole or "stream" in self.quirks.omits:
            sent.pop("stream_options", None)
            sent["stream"] = False
        return json.dumps(sent).encode()

    def _repaired_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in messages:
            if self.quirks.refuses_blanks:
                message["content"] = unblanked(message.get("content"), calls=bool(message.get("tool_calls")))
            elif message.get("role") == "assistant" and message.get("content") is None:
                message["content"] = ""
        return alternating(messages) if self._alternates else messages

    @property
    def _alternates(self) -> bool:
        return self.quirks.alternates or self.quirks.notes_within

    def of_reply(self, path: str, sent: bytes) -> ReplyRepair | None:
        """What repairs the reply to the request `sent`, which becomes a stream of events."""
        if not path.endswith(_PATH):
            return None
        body = as_object(json.loads(sent))
        return ReplyRepair(body) if body.get("stream") else None

    def of_refusal(self, sent: bytes, failure: ProviderFailure) -> Adaptation | None:
        """How the request `sent` is repaired from now on; `None` if the failure names nothing to leave out."""
        body = as_object(json.loads(sent)) if sent else {}
        found = without_stream(self.quirks, failure, body) if self.is_chat else None
        if found is None and _PROMPTS & body.keys():
            found = adapted(self.quirks, failure, body, _REQUIRED)
        return found if found is not None and _repaired(found.quirks) != _repaired(self.quirks) else None


def _repaired(quirks: Quirks) -> tuple[object, ...]:
    """The quirks that this module and `prompt` apply. pydantic-ai decides about the others."""
    placed = quirks.alternates or quirks.notes_within
    return quirks.omits, quirks.renames, quirks.reads, quirks.refuses_blanks, placed


class ReplyRepair:
    """Repairs the body of the reply to the request `sent`: a stream of events, line by line, or JSON as a whole."""

    def __init__(self, sent: Mapping[str, Any]) -> None:
        functions = [as_object(as_object(each).get("function")) for each in as_array(sent.get("tools"))]
        self._reading = ReplyAssembler(WireNames(as_string(each.get("name")) for each in functions))
        self._held: list[bytes] = []
        self._is_whole = False
        self.is_empty = True
        """Whether the server has sent nothing but white space so far."""

    def feed(self, chunk: bytes) -> bytes:
        """The repaired bytes that can be passed on.

        Raises:
            Refusal: the server reported an error.
            InvalidResponse: its reply has too many calls.
        """
        if self.is_empty and (beginning := chunk.lstrip(BLANK)):
            self.is_empty, self._is_whole = False, beginning.startswith((b"{", b"["))
        self._held.append(chunk)
        if self._is_whole or b"\n" not in chunk:
            return b""
        whole, newline, rest = b"".join(self._held).rpartition(b"\n")
        self._held = [rest]
        if not any(each in whole for each in _REPAIRED):
            return whole + newline
        return b"\n".join(map(self._repaired, whole.split(b"\n"))) + newline

    def finish(self) -> bytes:
        """The repaired bytes that `feed` held back. Raises as `feed`."""
        rest, self._held = b"".join(self._held), []
        if not self._is_whole:
            return self._repaired(rest)
        try:
            bodies = documents(rest)
        except (ValueError, RecursionError):
            return rest  # the SDK reports it
        events = [_streamed(self._checked(each)) for each in bodies]
        return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n"

    def _repaired(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or not any(each in line for each in _REPAIRED):
            return line
        try:
            event = json.loads(line.removeprefix(b"data:"))
        except (ValueError, RecursionError):
            return line  # the SDK reports it
        if event is None:  # it only keeps the connection open
            return b""
        event = self._checked(event)
        changed = [
            self._complete(fragment)
            for choice in as_array(event.get("choices"))
            for fragment in as_array(as_object(as_object(choice).get("delta")).get("tool_calls"))
            if isinstance(fragment, dict)
        ]
        return b"data: " + json.dumps(event).encode() if any(changed) else line

    def _complete(self, fragment: dict[str, Any]) -> bool:
        """Give a fragment the index of its call, and a name. Returns whether the fragment changed."""
        before = dict(fragment)
        call = self._reading.add_fragment(fragment)
        function = {"name": "", **as_object(fragment.get("function"))}
        fragment.update(index=self._reading.calls.index(call), function=function)
        return fragment != before

    def _checked(self, event: Any) -> Mapping[str, Any]:
        if reports_failure(event):
            raise Refusal(failure_in(event))
        return as_object(event)


def _streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """A complete reply as an event of a stream; an event as it is."""
    choices = [dict(as_object(each)) for each in as_array(body.get("choices"))]
    for choice in choices:
        message = dict(as_object(choice.pop("message", None)))
        if called := as_array(message.get("tool_calls")):
            message["tool_calls"] = [{**as_object(call), "index": index} for index, call in enumerate(called)]
        choice.setdefault("delta", message)
    return {**body, "object": "chat.completion.chunk", "choices": choices}
