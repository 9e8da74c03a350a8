"""Repairs requests and replies of servers that speak Chat Completions, where pydantic-ai or an SDK does not.

    what the server does                                 what is done
    refuses an assistant message with `content: null`    it gets an empty string
    refuses an option, such as `stream_options`          the option is left out, now and later (`learn`)
    gives parallel calls one index                       each call gets its own
    names a call only in its first fragment              the others get an empty name, which Mistral's SDK requires
    sends a complete JSON body instead of a stream       it becomes a stream of one event
    sends an error object in a stream                    it becomes perdure's error of it

All of it happens between the SDK and the server, for every path that ends in `/chat/completions`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from perdure.clock import Clock
from perdure.models.providers.errors import ProviderFailure, error_of
from perdure.models.providers.json_values import as_array, as_object, as_string
from perdure.text import untrusted
from perdure.text.patterns import compiled

log = logging.getLogger(__name__)

_PATH = "/chat/completions"
_NULLS = (b'"content": null', b'"content":null')
_UNSUPPORTED = ("support", "permitted", "allowed", "unrecognized", "unknown", "unexpected", "extra")
"""Of a message that refuses an option, and not only its value."""
_WORD = compiled(r"[A-Za-z_]+")
_NEEDED = frozenset({"model", "messages", "stream", "tools"})


class Repair(Protocol):
    """Repairs the body of one reply."""

    def feed(self, chunk: bytes) -> bytes:
        """The repaired bytes that can be passed on.

        Raises:
            PerdureError: the server reported an error.
        """
        ...

    def finish(self) -> bytes:
        """The repaired bytes that `feed` held back.

        Raises:
            PerdureError: the server reported an error.
        """
        ...


@dataclass(slots=True)
class ChatRepairs:
    """The repairs for one endpoint. `refused` has the options that the endpoint has refused."""

    name: str
    clock: Clock
    refused: set[str] = field(default_factory=set)

    def of_request(self, path: str, content: bytes) -> bytes | None:
        """The repaired body of a request; `None` if nothing is to be repaired."""
        if not path.endswith(_PATH) or not (self.refused or any(null in content for null in _NULLS)):
            return None
        body = json.loads(content)
        for message in body["messages"]:
            if message.get("role") == "assistant" and message.get("content") is None:
                message["content"] = ""
        return json.dumps({name: value for name, value in body.items() if name not in self.refused}).encode()

    def of_reply(self, path: str, content_type: str, sent: bytes) -> Repair | None:
        """What repairs the reply to the request `sent`, which becomes a stream of events."""
        if not path.endswith(_PATH):
            return None
        if content_type.startswith("text/event-stream"):
            return _Events(self.clock)
        if content_type.startswith("application/json") and as_object(json.loads(sent)).get("stream"):
            return _WholeBody(self.clock)
        return None

    def learn(self, sent: bytes, status: int | None, said: str) -> bool:
        """Remember the options of the request `sent` that an error names. Returns whether it names any."""
        if status not in {400, 422} or not sent or not any(each in said.lower() for each in _UNSUPPORTED):
            return False
        named = set(as_object(json.loads(sent))).intersection(_WORD.findall(said)) - _NEEDED - self.refused
        if named:
            log.warning("%s refuses %s, which is left out from now on", self.name, ", ".join(sorted(named)))
        self.refused |= named
        return bool(named)


@dataclass(slots=True)
class _Call:
    """A call under way: its index as the SDK sees it, and what the server has sent of it."""

    index: int
    id: str
    name: str
    arguments: str = ""

    @property
    def is_complete(self) -> bool:
        try:
            return bool(untrusted.load_object(self.arguments))
        except ValueError:
            return False


class _Events:
    """Repairs a stream of events, line by line."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._line = b""
        self._calls: dict[object, _Call] = {}
        self._count = 0

    def feed(self, chunk: bytes) -> bytes:
        text = self._line + chunk
        if b"tool_calls" not in text and b'"error"' not in text:
            whole, newline, self._line = text.rpartition(b"\n")
            return whole + newline
        *lines, self._line = text.split(b"\n")
        return b"".join(self._repaired(line) + b"\n" for line in lines)

    def finish(self) -> bytes:
        rest, self._line = self._line, b""
        return self._repaired(rest) if rest else b""

    def _repaired(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or (b'"tool_calls"' not in line and b'"error"' not in line):
            return line
        try:
            event = as_object(json.loads(line.removeprefix(b"data:")))
        except ValueError:
            return line  # the SDK reports it
        _raise_error_in(event, self._clock)
        changed = [
            self._complete(fragment)
            for choice in as_array(event.get("choices"))
            for fragment in as_array(as_object(as_object(choice).get("delta")).get("tool_calls"))
            if isinstance(fragment, dict)
        ]
        return b"data: " + json.dumps(event).encode() if any(changed) else line

    def _complete(self, fragment: dict[str, Any]) -> bool:
        """Give a fragment the index of its call, and a name. Returns whether the fragment changed."""
        function = as_object(fragment.get("function"))
        given, name, arguments = fragment.get("index"), as_string(function.get("name")), function.get("arguments")
        given_id = as_string(fragment.get("id")).replace("null", "")
        call = self._calls.get(given)
        differs = call is not None and name and (given_id != call.id if given_id and call.id else call.is_complete)
        if call is None or differs:
            call = self._calls[given] = _Call(self._count, given_id, name)
            self._count += 1
        call.id = call.id or given_id
        call.arguments += arguments if isinstance(arguments, str) else ""
        repaired = {**fragment, "index": call.index, "function": {"name": "", **function}}
        is_same = repaired == fragment
        fragment.update(repaired)
        return not is_same


class _WholeBody:
    """Makes a stream of one event of a complete reply."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._body = b""

    def feed(self, chunk: bytes) -> bytes:
        self._body += chunk
        return b""

    def finish(self) -> bytes:
        try:
            body = dict(as_object(json.loads(self._body)))
        except ValueError:
            return self._body  # the SDK reports it
        _raise_error_in(body, self._clock)
        body["object"] = "chat.completion.chunk"
        body["choices"] = [_streamed(as_object(choice)) for choice in as_array(body.get("choices"))]
        return b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"


def _streamed(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of a complete reply, as a choice of a stream."""
    message = dict(as_object(choice.get("message")))
    called = as_array(message.pop("tool_calls", None))
    calls = [{**as_object(call), "index": index} for index, call in enumerate(called)]
    return {**choice, "delta": {**message, "tool_calls": calls} if calls else message}


def _raise_error_in(event: Mapping[str, Any], clock: Clock) -> None:
    """Raise the error that a server reports under status 200, if it does.

    Raises:
        PerdureError: the server reported an error.
    """
    if error := event.get("error"):
        details = as_object(error)
        said = as_string(details.get("message")) or as_string(error)
        code = details.get("code")
        raise error_of(ProviderFailure(None, None if code is None else str(code), said, {}, details.get("type")), clock)
