"""A turn as an OpenAI response, whole or as a stream of events with sequence numbers.

An event's sequence number is computed from the answer's text. It combines the position at which the event's text ends
with a checksum of all text up to that position. Lines about tool calls, which form a reasoning item, count as text. The
numbers are therefore the same after a restart, on any gateway, and in a replay of the committed text.

If text is withdrawn, the events of the replacing text have other numbers, and a client that resumes after a number of
the withdrawn text gets an error. Live text and replayed text are cut into the same pieces, so a client that filters a
replay by number misses nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from perdure.channels.http.openai.answers import AnswerEnded, Called, CommittedAnswer, Idle, Part, Rewound, Text
from perdure.channels.http.openai.chat_completions import rewound, stopping
from perdure.channels.http.openai.errors import body_of
from perdure.channels.http.openai.wire import (
    ResponseRequest,
    call_id,
    epoch_s,
    finish_reason,
    has_failed,
    response_id,
    response_usage,
    suffixed,
)
from perdure.errors import PerdureError
from perdure.turns.additions import NO_ADDITIONS, Additions
from perdure.turns.calls.client import ClientCall, Exchange

PIECE_CHARS = 24
"""The maximum number of characters in one delta."""

_HEARTBEAT = b": still running\n\n"
_MARK = "\x1f"
"""A tool call has events without text. Each of them adds this character to the checksum, and 1 to the position."""

_CRC_BITS, _CHECK_BITS = 32, 24
"""The size of a checksum in bits, and the number of its high bits that form the low bits of a sequence number."""

_NOTED = "response:"
"""What the member of stored additions begins with that has what an exchange's request says of its response."""

_FORMAT_CHARS = 64
"""The longest name of a JSON schema in OpenAI's API."""

_ERROR = ("code", "message", "param")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_STATUSES = {"accepted": "queued", "done": "completed", "failed": "failed", "cancelled": "cancelled"}


@dataclass(frozen=True, slots=True)
class Response:
    """The members of a response that do not come from the turn's row and messages."""

    exchange: Exchange
    agent: str
    conversation: str | None
    previous: str | None = None
    background: bool = False
    additions: Additions = NO_ADDITIONS
    format: Mapping[str, Any] | None = None
    """`text.format` of the request, without its schema; `None`: the answer is text."""

    def body(
        self,
        turn: dict[str, Any],
        answer: CommittedAnswer | None = None,
        *,
        status: str | None = None,
    ) -> dict[str, Any]:
        """The response object; `answer` is what it says, if it is complete."""
        status = status or status_of(turn)
        if status == "in_progress" and answer is not None:  # the turn waits for the client
            status = "completed"
        error = turn["error"] if status == "failed" else None
        added = self.additions
        return {
            "id": response_id(self.exchange),
            "object": "response",
            "created_at": epoch_s(turn["accepted_at"]),
            "status": status,
            "background": self.background,
            "error": None if error is None else {"code": "server_error", "message": error["message"]},
            "incomplete_details": {"reason": _INCOMPLETE[finish_reason(turn)]} if status == "incomplete" else None,
            "instructions": added.instructions,
            "metadata": turn.get("metadata") or {},
            "model": self.agent,
            "output": [] if answer is None else _output(self.exchange, answer),
            "parallel_tool_calls": added.settings.get("parallel_tool_calls", True),
            "previous_response_id": self.previous,
            "conversation": None if self.conversation is None else {"id": self.conversation},
            "tool_choice": _choice(added.settings.get("tool_choice")),
            "tools": [
                {
                    "type": "function",
                    "name": each.name,
                    "description": each.description,
                    "parameters": each.parameters,
                    "strict": False,
                }
                for each in added.tools
            ],
            "text": {"format": _format(self.format, added.output)},
            "temperature": added.settings.get("temperature"),
            "top_p": added.settings.get("top_p"),
            "max_output_tokens": added.settings.get("max_tokens"),
            "store": added.remember,
            "usage": response_usage(None if answer is None else answer.used)
            if status in {"completed", "incomplete"}
            else None,
        }


def noting(additions: Additions, after: int, request: ResponseRequest) -> Additions:
    """`additions`, with what the response to `request` says of it. `after` is where its exchange begins."""
    given = {
        "background": request.background,
        "previous_response_id": request.previous_response_id,
        "format": None if additions.output is None else format_of(request),
    }
    kept = {name: value for name, value in given.items() if value}
    return replace(additions, extra={**additions.extra, f"{_NOTED}{after}": kept}) if kept else additions


def response_of(exchange: Exchange, agent: str, conversation: str | None, additions: Additions) -> Response:
    """The response of an exchange whose turn has the stored `additions`, with what `noting` has added to them."""
    noted = additions.extra.get(f"{_NOTED}{exchange.after}") or {}
    previous, background = noted.get("previous_response_id"), bool(noted.get("background"))
    return Response(exchange, agent, conversation, previous, background, additions, noted.get("format"))


def format_of(request: ResponseRequest) -> dict[str, Any] | None:
    """`Response.format` for a request; `None` if it asks for no JSON."""
    match (request.text or {}).get("format"):
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", **wanted}:
            name, strict = wanted.get("name"), wanted.get("strict")
            named = name[:_FORMAT_CHARS] if isinstance(name, str) else "output"
            return {"type": "json_schema", "name": named, "strict": strict if isinstance(strict, bool) else None}
        case _:
            return None


def _format(given: Mapping[str, Any] | None, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """The member `text.format`. Typed clients need it to read an answer that is JSON."""
    if given is None or schema is None:
        return {"type": "text"}
    return {**given, "schema": schema} if given["type"] == "json_schema" else dict(given)


def status_of(turn: dict[str, Any]) -> str:
    """The Responses API's name for a turn's status."""
    if turn["status"] in {"done", "failed"} and finish_reason(turn) in _INCOMPLETE:
        return "incomplete"
    return _STATUSES.get(turn["status"], "in_progress")


async def stream(
    response: Response,
    turn: dict[str, Any],
    parts: AsyncIterator[Part],
    starting_after: int | None,
    on_sent: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[bytes]:
    """The events of a response after the number `starting_after`, as server-sent events.

    `on_sent` is called before the closing events.
    """
    events = _Events(response, turn, starting_after)
    for event in events.begin():
        yield event
    try:
        async for part in parts:
            if isinstance(part, AnswerEnded) and on_sent is not None:
                await on_sent()
            for event in events.of(part):
                yield event
            if isinstance(part, AnswerEnded):
                return
    except Rewound:
        yield events.error(rewound())
        return
    except PerdureError as error:
        yield events.error(body_of(error))
        return
    yield events.error(stopping())


def pieces(text: str, *, whole: bool) -> Iterator[str]:
    """Cut a text into one piece per delta. If `whole` is false, omit a last piece that more text could extend."""
    begin = 0
    while begin < len(text):
        end = begin
        while end < len(text) and end - begin < PIECE_CHARS and not text[end].isspace():
            end += 1
        while end < len(text) and end - begin < PIECE_CHARS and text[end].isspace():
            end += 1
        if end == len(text) and end - begin < PIECE_CHARS and not whole:
            return
        yield text[begin:end]
        begin = end


class _Events:
    def __init__(self, response: Response, turn: dict[str, Any], starting_after: int | None) -> None:
        self._response = response
        self._turn = turn
        self._after = -1 if starting_after is None else starting_after
        self._known = starting_after is None
        """Whether the client's sequence number is known to belong to this text, because an event had this number.

        True from the beginning if the client gave no number.
        """
        self._text = ""
        self._numbered = 0
        """The number of characters of the text for which deltas were made."""
        self._calls: list[str] = []
        self._position = 0
        """The length of the text that is included in the checksum so far."""
        self._crc = 0
        self._last = -1
        self._sent = self._after
        """The number of the last event that the client has."""

    def begin(self) -> Iterator[bytes]:
        """The events before the text."""
        running = self._response.body(self._turn, status="in_progress")
        item = _item(self._response.exchange, None, "in_progress")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._event(0, "response.created", response=running)
        yield from self._event(1, "response.in_progress", response=running)
        yield from self._event(2, "response.output_item.added", output_index=0, item=item)
        yield from self._event(3, "response.content_part.added", **self._place, part=part)

    def of(self, part: Part) -> Iterator[bytes]:
        """The events for a part of the answer; none for a progress line.

        Raises:
            Rewound: the client's sequence number belongs to other text.
        """
        match part:
            case Text(text, progress):
                return iter(()) if progress else self.more(text)
            case Called(line):
                return self.call(line)
            case Idle():
                return iter((_HEARTBEAT,))
            case AnswerEnded():
                return self.end(part)
            case _:
                assert_never(part)

    def more(self, text: str, *, whole: bool = False) -> Iterator[bytes]:
        """Append `text` to the answer; returns the events of the complete deltas, or of all deltas if `whole`.

        Raises:
            Rewound: the client's sequence number belongs to other text.
        """
        self._text += text
        for piece in pieces(self._text[self._numbered :], whole=whole):
            self._numbered += len(piece)
            number = self._advance(piece)
            yield from self._event(number, "response.output_text.delta", **self._place, delta=piece, logprobs=[])

    def call(self, line: str) -> Iterator[bytes]:
        """The deltas of the remaining text, then the events that add a tool call to the reasoning item's summary.

        Raises:
            Rewound: the client's sequence number belongs to other text.
        """
        yield from self.more("", whole=True)
        if not self._calls:
            item = _reasoning(self._response.exchange, (), "in_progress")
            yield from self._event(self._advance(_MARK), "response.output_item.added", output_index=1, item=item)
        place = {"item_id": _name("rs", self._response.exchange), "output_index": 1, "summary_index": len(self._calls)}
        self._calls.append(line)
        part, empty = {"type": "summary_text", "text": line}, {"type": "summary_text", "text": ""}
        kind = "response.reasoning_summary"
        yield from self._event(self._advance(_MARK), f"{kind}_part.added", **place, part=empty)
        yield from self._event(self._advance(line), f"{kind}_text.delta", **place, delta=line)
        yield from self._event(self._advance(_MARK), f"{kind}_text.done", **place, text=line)
        yield from self._event(self._advance(_MARK), f"{kind}_part.done", **place, part=part)

    def _advance(self, text: str) -> int:
        """Add `text` to the checksum and the position. Returns the sequence number at the new position."""
        self._position += len(text)
        self._crc = zlib.crc32(text.encode(), self._crc)
        return (self._position << _CHECK_BITS) + (self._crc >> _CRC_BITS - _CHECK_BITS)

    def end(self, ended: AnswerEnded) -> Iterator[bytes]:
        """The last deltas of an answer, the calls that the client is to run, then the closing events.

        Raises:
            Rewound: the client's sequence number belongs to other text.
        """
        self._turn = turn = ended.turn
        if has_failed(turn):  # the API has no event for a cancelled response, only a status
            kind = "response.failed" if status_of(turn) == "failed" else "response.incomplete"
            yield from self._event(self._last + 1, kind, response=self._response.body(turn))
            return
        yield from self.more("", whole=True)
        answer = CommittedAnswer(turn, texts=[self._text], calls=self._calls, client_calls=ended.calls, used=ended.used)
        items = _output(self._response.exchange, answer)
        before = len(items) - len(ended.calls)
        for index, item in enumerate(items[before:], start=before):
            begun = {**item, "arguments": "", "status": "in_progress"}
            place = {"item_id": item["id"], "output_index": index}
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield from self._event(self._last + 1, "response.output_item.added", output_index=index, item=begun)
            yield from self._event(self._last + 1, f"{kind}.delta", **place, delta=arguments)
            yield from self._event(self._last + 1, f"{kind}.done", **place, name=item["name"], arguments=arguments)
        body = self._response.body(turn, answer)
        closing: tuple[tuple[str, dict[str, Any]], ...] = (
            ("response.output_text.done", {**self._place, "text": self._text, "logprobs": []}),
            ("response.content_part.done", {**self._place, "part": items[0]["content"][0]}),
            *(("response.output_item.done", {"output_index": index, "item": each}) for index, each in enumerate(items)),
            (f"response.{body['status']}", {"response": body}),
        )
        for kind, data in closing:
            yield from self._event(self._last + 1, kind, **data)
        if not self._known:  # the client's sequence number is above all numbers of this text
            raise Rewound

    def error(self, body: dict[str, Any]) -> bytes:
        """The event that ends the stream with an error. OpenAI's SDK reads `error`, other clients the members."""
        found = body["error"]
        data = {"type": "error", "sequence_number": self._sent + 1, **{name: found[name] for name in _ERROR}, **body}
        return _encode("error", data)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": _name("msg", self._response.exchange), "output_index": 0, "content_index": 0}

    def _event(self, number: int, kind: str, **data: Any) -> Iterator[bytes]:
        self._last = number
        self._known |= self._after in {number, number + 1}  # the error after this event has the next number
        if number <= self._after:
            return
        if not self._known:
            raise Rewound
        self._sent = number
        yield _encode(kind, {"type": kind, "sequence_number": number, **data})


def _item(exchange: Exchange, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    name = _name("msg", exchange)
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}


def _output(exchange: Exchange, answer: CommittedAnswer) -> list[dict[str, Any]]:
    """The items of a response. The message is first, because its index must be known before the first tool call."""
    reasoning = [_reasoning(exchange, answer.calls, "completed")] if answer.calls else []
    return [_item(exchange, answer.text, "completed"), *reasoning, *map(_function_call, answer.client_calls)]


def _reasoning(exchange: Exchange, calls: Sequence[str], status: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": line} for line in calls]
    return {"id": _name("rs", exchange), "type": "reasoning", "summary": summary, "status": status}


def _function_call(call: ClientCall) -> dict[str, Any]:
    return {
        "id": f"fc_{call.effect_id.hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id(call.effect_id),
        "name": call.tool,
        "arguments": call.arguments,
    }


def _choice(choice: Any) -> Any:
    """The member `tool_choice` for the setting of this name."""
    if isinstance(choice, list | tuple):
        functions = [{"type": "function", "name": each} for each in choice]
        several = {"type": "allowed_tools", "mode": "required", "tools": functions}
        return functions[0] if len(functions) == 1 else several
    return choice or "auto"


def _name(prefix: str, exchange: Exchange) -> str:
    return f"{prefix}_{suffixed(exchange, exchange.turn_id.hex)}"


def _encode(kind: str, value: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
