"""The protocol of language models. Each step of a turn calls a model.

A `Model` takes a `ModelRequest` and a `ModelCall`, and returns a `ModelReply`. The model reports streamed text to the
`ModelCall`. The engine ends the call from another thread when the turn is cancelled, the worker shuts down or the
deadline has passed. This works even while the model's thread is blocked on a socket. Providers raise only `CallAborted`
and errors of `perdure.errors`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, Self, runtime_checkable

from perdure.clock import Clock
from perdure.errors import Abandoned, DeadlineExceeded, PerdureError
from perdure.text.tokens import estimate_tokens

_CALL = frozenset({"id", "name", "arguments"})
_OPAQUE = frozenset({"endpoint", "family", "parts"})
_USAGE = frozenset({"input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens"})
_TOKENS_AROUND_A_SCHEMA = 8


def unknown_members(record: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The members of a stored `record` that are not in `known`. They are kept for the newer release that wrote them."""
    return {name: value for name, value in record.items() if name not in known}


class Role(StrEnum):
    """The author of a message in a transcript."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's request to call a tool.

    `id` is unique only within one reply. `arguments` is the model's text, unchanged, and may not be valid JSON. `extra`
    holds the stored members that this release does not know.
    """

    id: str
    name: str
    arguments: str
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        return cls(record["id"], record["name"], record["arguments"], unknown_members(record, _CALL))

    def to_dict(self) -> dict[str, Any]:
        return {**self.extra, "id": self.id, "name": self.name, "arguments": self.arguments}


@dataclass(frozen=True, slots=True)
class Opaque:
    """What a provider sent with a reply beside its text and calls, such as signatures and thoughts.

    `parts` is stored with the reply's message, and sent back as it came, to the endpoint and the model family that sent
    it. It is never sent to another one, and never shown as text. The model's wire determines the form of `parts`.
    `extra` holds the stored members that this release does not know.
    """

    endpoint: str
    family: str
    parts: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        return cls(record["endpoint"], record["family"], record["parts"], unknown_members(record, _OPAQUE))

    def to_dict(self) -> dict[str, Any]:
        return {**self.extra, "endpoint": self.endpoint, "family": self.family, "parts": self.parts}

    def is_from(self, endpoint: str, family: str) -> bool:
        return (self.endpoint, self.family) == (endpoint, family)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a message. `content[start:end]` describes it in text, for a model that cannot read it.

    `media_type` is the type of `data`, such as `image/png`.
    """

    media_type: str
    name: str | None
    start: int
    end: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a prompt. `tool_call_id` is set on tool results only, and `opaque` on a model's replies only.

    `files` are in the order of the text. A model that reads none of them reads `content`, which describes them.
    `extra` holds the members of a stored message that this release does not know; they are not sent to models.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    opaque: Opaque | None = field(default=None, repr=False)
    files: tuple[Attachment, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def pieces(self, media_types: Collection[str]) -> list[str | Attachment]:
        """The text and the files of these `media_types`, in order. Other files are described in the text."""
        found, at = list[str | Attachment](), 0
        for each in self.files:
            if each.media_type in media_types:
                found += [self.content[at : each.start].strip("\n"), each]
                at = each.end
        found.append(self.content[at:].strip("\n") if found else self.content)
        return [each for each in found if isinstance(each, Attachment) or each.strip()]


@dataclass(frozen=True)
class ToolSchema:
    """A tool's description for a model. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @cached_property
    def tokens(self) -> int:
        """A conservative estimate of the tokens that the schema takes in a prompt."""
        written = json.dumps(self.parameters, ensure_ascii=False)
        return sum(map(estimate_tokens, (self.name, self.description, written))) + _TOKENS_AROUND_A_SCHEMA


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the provider counted them.

    `cached_tokens` are the input tokens that were read from the provider's cache, and `reasoning_tokens` the output
    tokens of thoughts; each is `None` if the provider did not report it. `extra` holds the stored members that this
    release does not know.

    Example:
        >>> used = Usage(120, 1) + Usage(30, 2)
        >>> used.input_tokens, used.output_tokens
        (150, 3)
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        return cls(
            record.get("input_tokens", 0),
            record.get("output_tokens", 0),
            record.get("cached_tokens"),
            record.get("reasoning_tokens"),
            unknown_members(record, _USAGE),
        )

    def to_dict(self) -> dict[str, Any]:
        """The usage in its stored and displayed form."""
        return {
            **self.extra,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": self.reasoning_tokens,
        }

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            added(self.cached_tokens, other.cached_tokens),
            added(self.reasoning_tokens, other.reasoning_tokens),
        )


def added(one: int | None, other: int | None) -> int | None:
    """The sum of two counts as far as they are reported; `None` if neither is."""
    return None if one is None and other is None else (one or 0) + (other or 0)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One prompt: system messages first, then the conversation, oldest first.

    Each of the first system messages changes less often than the next. A system message within the conversation is a
    note about the message that follows it, and no later prompt has it (`perdure.models.notes`).

    `settings` has the settings of the call, with the names of pydantic-ai, such as `temperature`. `output` is the JSON
    schema that the reply's text should fit. A model without structured output ignores it, unless `requires_output` is
    true: it then gets the schema as a tool (`perdure.models.output_tool`). `cache_key` is the same for the prompts of
    one conversation, which begin alike; a provider that routes requests by it finds more of a prompt in its cache.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] | None = None
    requires_output: bool = False
    cache_key: str | None = None


@dataclass(frozen=True, slots=True)
class ModelReply:
    """A model's reply: text, tool calls, or both. `model` is the name that the provider reported.

    `usage` is `None` if the provider did not report it. `stop_reason` says how the reply ended: `stop` or `tool_calls`
    if it is complete, `length` if it was cut off, `content_filter`, `refusal`, or the provider's own word; empty if the
    provider named none. Tool calls run only if the reply is complete (`perdure.models.endings`). `fallback` is true if
    a fallback replied because the requested model failed. `thoughts` is what the model wrote before its answer; it is
    no part of the reply. `opaque` is what the provider needs back with the next prompt.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None
    model: str = ""
    stop_reason: str = "stop"
    fallback: bool = False
    thoughts: str = ""
    opaque: Opaque | None = None


class CallAborted(Abandoned):
    """The engine aborted the call. The call's text is discarded, and the call does not count as an attempt."""


class ModelCall:
    """One call of a model: its deadline, its streamed text and its abort.

    Models use `delta`, `remaining` and `aborting`; the engine uses `abort`, `expire` and `expire_overdue`;
    retries and fallbacks use `part` and `rewind`. All methods are thread-safe.
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
        self.may_shorten = False
        """Whether the engine may ask again with a shorter prompt after `ContextTooLong`. Fallbacks then wait."""
        self.fallback_waits = False
        """Whether a fallback was not called because of `may_shorten`."""
        self._streamed = False
        self._part: ModelCall | None = None
        self._lock = threading.Lock()
        self._reason: PerdureError | None = None
        self._on_abort: Callable[[], None] | None = None

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
        """Raise an error if the call has ended.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
        """
        if self._reason is not None:
            raise self._reason

    def delta(self, text: str) -> None:
        """Report a piece of streamed text. The text is provisional until the step is committed.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
        """
        self.remaining()
        if text and self._on_delta is not None:
            self._streamed = True
            self._on_delta(text)

    def rewind(self) -> None:
        """Withdraw all text reported so far. The next reported text is the beginning of a new reply."""
        streamed, self._streamed = self._streamed, False
        if streamed and self._on_rewind is not None:
            self._on_rewind()

    @contextmanager
    def part(self, timeout_s: float) -> Iterator[ModelCall]:
        """Begin a part of this call. The part ends after `timeout_s` seconds, or earlier if this call ends.

        The end of the part does not end this call: another part may follow.

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
    def aborting(self, on_abort: Callable[[], None]) -> Iterator[None]:
        """If the call ends while the block runs, the thread that ends the call runs `on_abort`.

        If the call ended before the block, the block does not run. If the call ends while the block runs, the error
        below is raised at the end of the block, in place of any error that the block raised.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
        """
        with self._lock:
            self._on_abort = on_abort
        try:
            self.check()
            yield
        except Exception:
            self.check()
            raise
        finally:
            with self._lock:
                self._on_abort = None
        self.check()

    def abort(self) -> None:
        self._end(CallAborted("The call was ended."))

    def expire(self) -> None:
        self._end(DeadlineExceeded("The model did not answer in time."))

    def expire_overdue(self) -> None:
        """End the call if its deadline has passed. If only its running part is overdue, end that part."""
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
            on_abort = self._on_abort
        if on_abort is not None:
            on_abort()


@runtime_checkable
class ForeignModel(Protocol):
    """A model object of pydantic-ai. Its name is that of its system and model, such as `google:gemini-2.5-pro`."""

    @property
    def system(self) -> str: ...

    @property
    def model_name(self) -> str: ...


def name_of(model: str | ForeignModel) -> str:
    """The name of a model as in `PERDURE_MODEL`."""
    return model if isinstance(model, str) else f"{model.system}:{model.model_name}"


def read_by(model: Model) -> frozenset[str]:
    """The media types of files that `model` may read; a model without the attribute `reads` reads none."""
    reads: frozenset[str] = getattr(model, "reads", frozenset())
    return reads


class Model(Protocol):
    """A language model.

    A model that reads files has an attribute `reads`, the media types that it may read. `Message.files` has only files
    of these types.
    """

    @property
    def name(self) -> str:
        """The model's name as in `PERDURE_MODEL`, such as `openai:gpt-5` or `offline`."""
        ...

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt within the call's deadline.

        Raises:
            CallAborted: the engine aborted the call.
            DeadlineExceeded: the deadline passed.
            ContextTooLong, ContentFiltered, IncompleteReply: the input causes the error, which is no failure of the
                provider.
            RateLimited, InvalidResponse, ProviderError: the provider failed.
        """
        ...
