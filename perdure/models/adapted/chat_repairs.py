"""Repairs requests and replies of servers that speak Chat Completions, where pydantic-ai or an SDK does not.

    what the server does                                 what is done
    refuses an assistant message with `content: null`    it gets an empty string
    refuses an option, such as `stream_options`          the option is left out, now and later (`learn`)
    answers with an empty stream                         it is asked for a reply without a stream
    gives parallel calls one index                       each call gets its own
    names a call only in its first fragment              the others get an empty name, which Mistral's SDK requires
    sends a complete JSON body instead of a stream       it becomes a stream of one event
    sends an error object in a stream                    it becomes perdure's error of it

All of it happens between the SDK and the server, for every path that ends in `/chat/completions`. What the server means
is read as on perdure's own wire.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure.clock import Clock
from perdure.models.providers.chat_wire import WIRE, ReplyAssembler
from perdure.models.providers.endpoint import NO_QUIRKS, Quirks, adapted
from perdure.models.providers.errors import ProviderFailure, error_of, failure_in, reports_failure
from perdure.models.providers.json_values import as_array, as_object, as_string, documents
from perdure.models.providers.model import BLANK
from perdure.models.providers.wire_names import WireNames

log = logging.getLogger(__name__)

_PATH = "/chat/completions"
_NULLS = (b'"content": null', b'"content":null')
_STREAMS = ("text/event-stream", "application/json")


@dataclass(slots=True)
class ChatRepairs:
    """The repairs for one endpoint. `quirks` has what the endpoint has refused."""

    name: str
    clock: Clock
    quirks: Quirks = NO_QUIRKS

    def of_request(self, path: str, content: bytes, *, is_whole: bool) -> bytes | None:
        """The repaired body of a request; `None` if nothing is to be repaired. `is_whole`: it asks for no stream."""
        is_null = any(null in content for null in _NULLS)
        if not path.endswith(_PATH) or not (is_whole or is_null or self.quirks != NO_QUIRKS):
            return None
        body = json.loads(content)
        for message in body["messages"]:
            if message.get("role") == "assistant" and message.get("content") is None:
                message["content"] = ""
            for part in (message, *message.get("tool_calls", ())):
                for name in self.quirks.omits.intersection(part):
                    del part[name]
        renamed = {self.quirks.renames.get(name, name): value for name, value in body.items()}
        sent = {name: value for name, value in renamed.items() if name not in self.quirks.omits}
        if is_whole:
            sent.pop("stream_options", None)
            sent["stream"] = False
        return json.dumps(sent).encode()

    def of_reply(self, path: str, content_type: str, sent: bytes) -> ReplyRepair | None:
        """What repairs the reply to the request `sent`, which becomes a stream of events."""
        if not path.endswith(_PATH) or not content_type.startswith(_STREAMS):
            return None
        body = as_object(json.loads(sent))
        return ReplyRepair(body, self.clock) if body.get("stream") else None

    def learn(self, sent: bytes, failure: ProviderFailure) -> bool:
        """Remember the options of the request `sent` that an error refuses. Returns whether there are any."""
        body = as_object(json.loads(sent)) if sent else {}
        found = adapted(self.quirks, failure, body, WIRE.required) if "messages" in body else None
        if found is None or (found.quirks.omits, found.quirks.renames) == (self.quirks.omits, self.quirks.renames):
            return False
        log.warning("%s refuses %s, which is left out from now on", self.name, found.what)
        self.quirks = found.quirks
        return True


class ReplyRepair:
    """Repairs the body of the reply to the request `sent`: a stream of events, line by line, or JSON as a whole."""

    def __init__(self, sent: Mapping[str, Any], clock: Clock) -> None:
        functions = [as_object(as_object(each).get("function")) for each in as_array(sent.get("tools"))]
        self._reading = ReplyAssembler(WireNames(as_string(each.get("name")) for each in functions))
        self._clock = clock
        self._held: list[bytes] = []
        self._is_whole = False
        self.is_empty = True
        """Whether the server has sent nothing but white space so far."""

    def feed(self, chunk: bytes) -> bytes:
        """The repaired bytes that can be passed on.

        Raises:
            PerdureError: the server reported an error, or its reply has too many calls.
        """
        if self.is_empty and (beginning := chunk.lstrip(BLANK)):
            self.is_empty, self._is_whole = False, beginning.startswith((b"{", b"["))
        self._held.append(chunk)
        if self._is_whole or b"\n" not in chunk:
            return b""
        whole, newline, rest = b"".join(self._held).rpartition(b"\n")
        self._held = [rest]
        if b"tool_calls" not in whole and b'"error"' not in whole:
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
        if not line.startswith(b"data:") or (b'"tool_calls"' not in line and b'"error"' not in line):
            return line
        try:
            event = self._checked(json.loads(line.removeprefix(b"data:")))
        except (ValueError, RecursionError):
            return line  # the SDK reports it
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
            raise error_of(failure_in(event), self._clock)
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
