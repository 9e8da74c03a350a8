"""A turn as a chat completion, whole or as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from perdure.channels.http.openai.answers import AnswerEnded, Called, Idle, Part, Rewound, Text
from perdure.channels.http.openai.errors import REWOUND, STOPPING, body_of, error_body, failure_body
from perdure.channels.http.openai.wire import chat_usage, epoch_s, finish_reason
from perdure.errors import PerdureError

_HEARTBEAT = b": still running\n\n"
_END = b"data: [DONE]\n\n"
_REWOUND = "The text that was sent so far is withdrawn. Send the request again: it finds the same turn and its text."
_STOPPING = "This gateway is shutting down. Send the request again: it finds the same turn and its text."


@dataclass(frozen=True, slots=True)
class Completion:
    """The identity of a completion. `created` is the time of its creation in epoch seconds."""

    turn_id: str
    agent: str
    created: int

    def whole(self, turn: dict[str, Any], text: str) -> dict[str, Any]:
        """The `chat.completion` object for a settled turn with the answer `text`."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(turn), "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": chat_usage(turn)}

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """A `chat.completion.chunk` object with one choice."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, turn: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": chat_usage(turn)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.turn_id}", "object": kind, "created": self.created, "model": self.agent}


def completion_of(turn: dict[str, Any], agent: str) -> Completion:
    return Completion(turn["turn_id"], agent, epoch_s(turn["accepted_at"]))


async def stream(
    completion: Completion,
    parts: AsyncIterator[Part],
    *,
    include_usage: bool,
    on_sent: Callable[[], Awaitable[None]],
) -> AsyncIterator[bytes]:
    """The chunks of a turn's answer as server-sent events. `on_sent` is called before the last chunk."""
    yield encode(completion.chunk({"role": "assistant", "content": ""}))
    try:
        async for part in parts:
            match part:
                case Text() | Called():
                    yield encode(completion.chunk(_delta(part)))
                case Idle():
                    yield _HEARTBEAT
                case AnswerEnded(turn):
                    await on_sent()  # before the last chunk, after which the client may send the same text again
                    for chunk in _ending(completion, turn, include_usage=include_usage):
                        yield chunk
                    return
        yield encode(stopping())
    except Rewound:
        yield encode(rewound())
    except PerdureError as error:
        yield encode(body_of(error))


def _delta(part: Text | Called) -> dict[str, str]:
    if isinstance(part, Called):
        return {"reasoning_content": part.line}
    return {"reasoning_content" if part.progress else "content": part.text}


def _ending(completion: Completion, turn: dict[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """The last chunks of a settled turn, or its error."""
    if turn["error"] is not None:
        yield encode(failure_body(turn)[0])
        return
    yield encode(completion.chunk({}, finish_reason(turn)))
    if include_usage:
        yield encode(completion.usage_chunk(turn))
    yield _END


def rewound() -> dict[str, Any]:
    """The error that ends a stream if sent text is withdrawn."""
    return error_body(_REWOUND, "server_error", REWOUND)


def stopping() -> dict[str, Any]:
    """The error that ends a stream if the gateway stops."""
    return error_body(_STOPPING, "server_error", STOPPING)


def encode(value: dict[str, Any]) -> bytes:
    """`value` as a server-sent event without a name."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
