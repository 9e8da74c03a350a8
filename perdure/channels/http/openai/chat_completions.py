"""A turn as a chat completion, whole or as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.channels.http.openai.answers import AnswerEnded, Called, Idle, Part, Rewound, Text
from perdure.channels.http.openai.errors import REWOUND, STOPPING, body_of, error_body, failure_body
from perdure.channels.http.openai.wire import call_id, chat_usage, epoch_s, finish_reason, has_failed, suffixed
from perdure.errors import PerdureError
from perdure.models.endings import TOOL_CALLS
from perdure.turns.calls.client import ClientCall, Exchange

_HEARTBEAT = b": still running\n\n"
_END = b"data: [DONE]\n\n"
_REWOUND = "The text that was sent so far is withdrawn. Send the request again: it finds the same turn and its text."
_STOPPING = "This gateway is shutting down. Send the request again: it finds the same turn and its text."


@dataclass(frozen=True, slots=True)
class Completion:
    """The identity of a completion. `created` is the time of its creation in epoch seconds."""

    name: str
    agent: str
    created: int

    def whole(
        self,
        turn: dict[str, Any],
        text: str,
        used: dict[str, Any] | None,
        calls: Sequence[ClientCall] = (),
    ) -> dict[str, Any]:
        """The `chat.completion` object for the answer `text` and the `calls` that the client is to run."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if calls:
            message |= {"content": text or None, "tool_calls": [_tool_call(each) for each in calls]}
        reason = TOOL_CALLS if calls else finish_reason(turn)
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        metadata = {"metadata": turn["metadata"]} if turn.get("metadata") else {}
        return {**self._head("chat.completion"), "choices": [choice], "usage": chat_usage(used), **metadata}

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """A `chat.completion.chunk` object with one choice."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, used: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": chat_usage(used)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.name}", "object": kind, "created": self.created, "model": self.agent}


def completion_of(exchange: Exchange, turn: dict[str, Any], agent: str) -> Completion:
    return Completion(suffixed(exchange, turn["turn_id"]), agent, epoch_s(turn["accepted_at"]))


async def stream(
    completion: Completion,
    parts: AsyncIterator[Part],
    *,
    include_usage: bool,
    on_sent: Callable[[], Awaitable[None]],
) -> AsyncIterator[bytes]:
    """The chunks of an answer as server-sent events. `on_sent` is called before the last chunk."""
    yield encode(completion.chunk({"role": "assistant", "content": ""}))
    try:
        async for part in parts:
            match part:
                case Text() | Called():
                    yield encode(completion.chunk(_delta(part)))
                case Idle():
                    yield _HEARTBEAT
                case AnswerEnded():
                    await on_sent()  # before the last chunk, after which the client may send the same text again
                    for chunk in _ending(completion, part, include_usage=include_usage):
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


def _ending(completion: Completion, ended: AnswerEnded, *, include_usage: bool) -> Iterator[bytes]:
    """The last chunks of an answer: the calls that the client is to run, and the end; or the error of its turn."""
    if has_failed(ended.turn):
        yield encode(failure_body(ended.turn)[0])
        return
    for number, each in enumerate(ended.calls):
        yield encode(completion.chunk({"tool_calls": [{"index": number, **_tool_call(each)}]}))
    yield encode(completion.chunk({}, TOOL_CALLS if ended.calls else finish_reason(ended.turn)))
    if include_usage:
        yield encode(completion.usage_chunk(ended.used))
    yield _END


def _tool_call(call: ClientCall) -> dict[str, Any]:
    function = {"name": call.tool, "arguments": call.arguments}
    return {"id": call_id(call.effect_id), "type": "function", "function": function}


def rewound() -> dict[str, Any]:
    """The error that ends a stream if sent text is withdrawn."""
    return error_body(_REWOUND, "server_error", REWOUND)


def stopping() -> dict[str, Any]:
    """The error that ends a stream if the gateway stops."""
    return error_body(_STOPPING, "server_error", STOPPING)


def encode(value: dict[str, Any]) -> bytes:
    """`value` as a server-sent event without a name."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
