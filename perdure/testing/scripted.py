"""A model whose replies a test defines."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, overload

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from perdure.clock import MovedClock
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, ToolCall, Usage
from perdure.output import OutputType
from perdure.tools.registry import Tool, ToolContext

P = ParamSpec("P")

Respond = Callable[[ModelRequest, ModelCall], ModelReply]

Reply = str | ToolCall | list[ToolCall] | ModelReply | Exception | Respond | Any
"""A text, one or several tool calls, a whole `ModelReply`, an error to raise, or a function that makes the reply.

Any other value, such as a model of pydantic, is an output: its JSON is the text.
"""

_NAME = "scripted"


class ScriptExhausted(AssertionError):
    """The agent called the model more often than the script has replies.

    Example:
        >>> ask(Agent("assistant", "You help."), "Hello.", model=Scripted())
        Traceback (most recent call last):
            ...
        perdure.testing.scripted.ScriptExhausted: request 1 has no reply in the script; ...
    """


@dataclass(frozen=True, slots=True)
class Late:
    """A reply that takes `seconds`."""

    seconds: float
    reply: Reply


@overload
def call(tool: str, raw: str | None = None, /, **arguments: Any) -> ToolCall: ...


@overload
def call(
    tool: Callable[Concatenate[ToolContext[Any], P], Any], /, *args: P.args, **arguments: P.kwargs
) -> ToolCall: ...


@overload
def call(tool: Callable[P, Any], /, *args: P.args, **arguments: P.kwargs) -> ToolCall: ...


def call(tool: str | Callable[..., Any], /, *args: Any, **arguments: Any) -> ToolCall:
    """A call of `tool` in a scripted reply: of a tool's function, whose parameters are checked, or of a name.

    A `ToolContext` is no argument of the call. Type checkers know this if it is the function's first parameter.

    After a name, a text, which may be malformed JSON, replaces the JSON of `arguments`.

    Raises:
        TypeError: the function has no such parameter.

    Example:
        >>> call("weather", city="Paris").arguments
        '{"city": "Paris"}'
        >>> call("weather", '{"city": ').arguments
        '{"city": '
    """
    if isinstance(tool, str):
        return ToolCall("", tool, args[0] if args else json.dumps(arguments))
    function, name = (tool.function, tool.name) if isinstance(tool, Tool) else (tool, tool.__name__)
    signature = inspect.signature(function)
    if isinstance(tool, Tool):  # its context is no argument
        named = tool.parameters.get("properties", {})
        signature = signature.replace(parameters=[each for key, each in signature.parameters.items() if key in named])
    given = signature.bind_partial(*args, **arguments).arguments
    return ToolCall("", name, json.dumps(to_jsonable_python(given)))


def late(seconds: float, reply: Reply) -> Late:
    """A reply that takes `seconds`. `Scripted` advances its clock by `seconds` instead of sleeping.

    Example:
        >>> ask(Agent("assistant", "You help.", timeout_s=60), "Hello.", model=Scripted(late(90, "Hi."))).error_code
        'TIMEOUT'
    """
    return Late(seconds, reply)


class Scripted:
    """A `Model` that gives its replies in order and records each request. Threads may share it.

    `reads` has the media types of the files that the model reads, such as `image/png`; other files are described to it.
    A reply made by `late` advances `clock`. The turn uses this clock too, unless another clock is passed to
    `perdure.testing.ask`.

    Example:
        >>> model = Scripted("Hi.")
        >>> ask(Agent("assistant", "You help."), "Hello.", model=model).reply
        'Hi.'
        >>> model.requests[0].messages[-1].content
        'Hello.'
    """

    name = _NAME

    def __init__(self, *replies: Reply | Late, clock: MovedClock | None = None, reads: Collection[str] = ()) -> None:
        self.clock = clock or MovedClock()
        self.reads = frozenset(reads)
        self.requests: list[ModelRequest] = []
        self._replies = list(replies)
        self._lock = threading.Lock()

    @property
    def unused(self) -> int:
        """The number of replies that were not used."""
        return len(self._replies)

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Give the next reply.

        Raises:
            ScriptExhausted: the script has no further reply.
            Exception: the next reply, if it is an exception.
            DeadlineExceeded: the call's deadline passed before the reply.
        """
        with self._lock:
            self.requests.append(request)
            if not self._replies:
                last = request.messages[-1]
                raise ScriptExhausted(
                    f"request {len(self.requests)} has no reply in the script; "
                    f"its last message is {last.role.value}: {last.content!r}"
                )
            reply = self._replies.pop(0)
        if isinstance(reply, Late):
            self.clock.advance(timedelta(seconds=reply.seconds))
            reply = reply.reply
        call.remaining()
        made = _reply(reply, request, call)
        call.delta(made.content)
        return made


def _reply(reply: Reply, request: ModelRequest, call: ModelCall) -> ModelReply:
    match reply:
        case Exception():
            raise reply
        case ModelReply():
            return reply
        case str():
            return ModelReply(reply, usage=Usage(), model=_NAME, stop_reason="stop")
        case ToolCall():
            return ModelReply("", (reply,), Usage(), _NAME, "tool_calls")
        case _ if callable(reply):
            return reply(request, call)
        case list() if reply and all(isinstance(each, ToolCall) for each in reply):
            return ModelReply("", tuple(reply), Usage(), _NAME, "tool_calls")
        case _:
            is_model = isinstance(reply, BaseModel)
            data = OutputType(type(reply), _NAME).to_json(reply) if is_model else to_jsonable_python(reply)
            return ModelReply(json.dumps(data), usage=Usage(), model=_NAME, stop_reason="stop")
