"""What the step loop asks of a model, whoever provides it.

A `Model` gets a `ModelRequest` and a `ModelCall`, and returns a `ModelReply`. The request
is data; the call is the line back to the engine: the model reports streamed text through
it, and the engine can end the call through it from another thread (the turn was cancelled,
the worker shuts down, the deadline has passed), even while the model's thread waits on a
silent socket. Providers raise the errors of `perdure.errors` and no others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

from perdure.clock import Clock
from perdure.errors import Abandoned, DeadlineExceeded, PerdureError

_CALL = frozenset({"id", "name", "arguments"})
_USAGE = frozenset({"input_tokens", "output_tokens"})


def unknown_members(record: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The members of a stored record that this release does not know: a newer one wrote them, and reads them again."""
    return {name: value for name, value in record.items() if name not in known}


class Role(StrEnum):
    """Who speaks in a transcript."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's wish to have a tool called.

    `id` is unique only within one reply. `arguments` is the text exactly as the model gave
    it, which may not be JSON at all. `extra` holds the stored members that this release does not know.
    """

    id: str
    name: str
    arguments: str
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The call that was stored as `record`."""
        return cls(record["id"], record["name"], record["arguments"], unknown_members(record, _CALL))

    def record(self) -> dict[str, Any]:
        """The call as it is stored."""
        return {**self.extra, "id": self.id, "name": self.name, "arguments": self.arguments}


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a prompt. `tool_call_id` is set on tool results only.

    `extra` holds the members of a stored message that this release does not know; no model is sent them.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as a model sees it. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the provider counted them. `extra` holds the stored members that this release does not know."""

    input_tokens: int = 0
    output_tokens: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The usage that was stored as `record`."""
        return cls(record.get("input_tokens", 0), record.get("output_tokens", 0), unknown_members(record, _USAGE))

    def record(self) -> dict[str, Any]:
        """Usage as it is stored and shown."""
        return {**self.extra, "input_tokens": self.input_tokens, "output_tokens": self.output_tokens}

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One prompt: the system message first, then the conversation, oldest first."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What a model answered: text, tool calls, or both. `model` is the name it gave itself.

    `fallback` says that another model answered than the one that was asked.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    model: str = ""
    stop_reason: str = ""
    fallback: bool = False


class CallAborted(Abandoned):
    """The engine ended the call; nothing of it is kept, and nobody is at fault."""


class ModelCall:
    """One call of a model, seen from both of its ends.

    The model's side uses `delta`, `remaining` and `aborting`; the engine's side `abort`,
    `expire` and `expire_overdue`. What stands between them, trying again or another model, uses
    `part` and `rewind`. All of them may be used from any thread.
    """

    def __init__(
        self,
        clock: Clock,
        timeout_s: float,
        on_delta: Callable[[str], None] | None = None,
        on_rewind: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock
        self.deadline = clock.monotonic() + timeout_s
        self._on_delta = on_delta
        self._on_rewind = on_rewind
        self._heard = False
        self._part: ModelCall | None = None
        self._lock = threading.Lock()
        self._reason: PerdureError | None = None
        self._hang_up: Callable[[], None] | None = None

    def remaining(self) -> float:
        """Seconds left before the deadline.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
        """
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            self.expire()
        self.check()
        return left

    def check(self) -> None:
        """Return if the call may go on.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
        """
        if self._reason is not None:
            raise self._reason

    def delta(self, text: str) -> None:
        """Report a piece of streamed text, provisional until the step is committed.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
        """
        self.remaining()
        if text and self._on_delta is not None:
            self._heard = True
            self._on_delta(text)

    def rewind(self) -> None:
        """Take back all the text that was reported so far: what comes next begins the reply anew."""
        heard, self._heard = self._heard, False
        if heard and self._on_rewind is not None:
            self._on_rewind()

    @contextmanager
    def part(self, timeout_s: float) -> Iterator[ModelCall]:
        """A call within this one, over after `timeout_s` and no later than this one.

        That the part is over does not end the whole: another may follow.

        Raises:
            CallAborted, DeadlineExceeded: the whole call is over.
        """
        part = ModelCall(self._clock, min(timeout_s, self.remaining()), self.delta, self.rewind)
        self._part = part
        try:
            with self.aborting(self._end_part):
                yield part
        finally:
            self._part = None

    @contextmanager
    def aborting(self, hang_up: Callable[[], None]) -> Iterator[None]:
        """Have `hang_up` called, from another thread, if the call is ended within the block.

        Whatever error the broken connection then raises inside the block is replaced by the
        reason for which the call was ended.
        """
        with self._lock:
            self._hang_up = hang_up
        try:
            self.check()
            yield
        except Exception:
            self.check()
            raise
        finally:
            with self._lock:
                self._hang_up = None
        self.check()

    def abort(self) -> None:
        """End the call for a reason of the engine's own."""
        self._end(CallAborted("The call was ended."))

    def expire(self) -> None:
        """End the call because its deadline has passed."""
        self._end(DeadlineExceeded("The model did not answer in time."))

    def expire_overdue(self) -> None:
        """End what has passed its deadline: the call, or only the part of it that is under way."""
        part = self._part
        if part is not None:
            part.expire_overdue()
        if self._clock.monotonic() >= self.deadline:
            self.expire()

    def _end_part(self) -> None:
        part, reason = self._part, self._reason
        if part is not None and reason is not None:
            part._end(reason)  # noqa: SLF001 (another of this class)

    def _end(self, reason: PerdureError) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            hang_up = self._hang_up
        if hang_up is not None:
            hang_up()


class Model(Protocol):
    """A language model."""

    @property
    def name(self) -> str:
        """As in `PERDURE_MODEL`, such as `openai:gpt-5` or `offline`."""
        ...

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Answer one prompt, within the call's deadline.

        Raises:
            CallAborted: the engine ended the call.
            DeadlineExceeded: the deadline passed.
            RateLimited, ContextTooLong, InvalidResponse, ProviderError: as the provider failed.
        """
        ...
