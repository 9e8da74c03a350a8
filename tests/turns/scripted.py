"""A model that returns scripted replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.models.providers.chat_wire import request_body
from tests.models.openai_server import validate_transcript

Line = ModelReply | BaseException | Callable[[ModelRequest, ModelCall], ModelReply]


UNREPORTED = {"cached_tokens": None, "reasoning_tokens": None}
"""The members of a usage that the scripted model does not report."""


def says(text: str) -> ModelReply:
    """A reply without tool calls, which ends the turn."""
    return ModelReply(text, usage=Usage(10, 2), model="scripted")


def calls(*wanted: tuple[str, dict[str, Any] | str], ids: Sequence[str] | None = None) -> ModelReply:
    """A reply with tool calls, each given as `(name, arguments)`."""
    made = tuple(
        ToolCall(ids[number] if ids else f"call_{number}", name, given if isinstance(given, str) else json.dumps(given))
        for number, (name, given) in enumerate(wanted)
    )
    return ModelReply("", made, Usage(10, 5), "scripted")


class Scripted:
    """Replies with its lines in order, then with `ok`.

    `requests` records all requests. `problems` records the faults for which a provider would reject a request.
    """

    name = "scripted"

    def __init__(self, *lines: Line) -> None:
        self.lines = list(lines)
        self.requests: list[ModelRequest] = []
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Use the next line: return it if it is a reply, raise it if it is an exception, or else call it."""
        with self._lock:
            self.requests.append(request)
            self.problems += validate_transcript(request_body(self.name, request)["messages"])
            line = self.lines.pop(0) if self.lines else says("ok")
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, ModelReply):
            call.delta(line.content)
            return line
        return line(request, call)


def system_text(request: ModelRequest) -> str:
    """The texts of the prompt's system messages, the note before the turn's message included."""
    return "\n\n".join(each.content for each in request.messages if each.role is Role.SYSTEM)


def spoken(request: ModelRequest) -> list[Message]:
    """The prompt's messages without those of the system."""
    return [each for each in request.messages if each.role is not Role.SYSTEM]
