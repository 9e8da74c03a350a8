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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from perdure.channels.http.openai.answers import AnswerEnded, Called, Idle, Part, Rewound, Text
from perdure.channels.http.openai.chat_completions import rewound, stopping
from perdure.channels.http.openai.errors import body_of
from perdure.channels.http.openai.wire import epoch_s, finish_reason, response_id, response_usage
from perdure.errors import PerdureError

PIECE_CHARS = 24
"""The maximum number of characters in one delta."""

_HEARTBEAT = b": still running\n\n"
_MARK = "\x1f"
"""A tool call has events without text. Each of them adds this character to the checksum, and 1 to the position."""

_CRC_BITS, _CHECK_BITS = 32, 24
"""The size of a checksum in bits, and the number of its high bits that form the low bits of a sequence number."""

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_STATUSES = {"accepted": "queued", "done": "completed", "failed": "failed", "cancelled": "cancelled"}


@dataclass(frozen=True, slots=True)
class Response:
    """The members of a response that do not come from the turn's row and messages."""

    agent: str
    conversation: str | None
    previous: str | None = None
    background: bool = False

    def body(
        self,
        turn: dict[str, Any],
        text: str | None = None,
        calls: Sequence[str] = (),
        *,
        status: str | None = None,
    ) -> dict[str, Any]:
        """The response object; `text` is the answer of a settled turn, and `calls` are the lines about tool calls."""
        status = status or status_of(turn)
        error = turn["error"] if status == "failed" else None
        return {
            "id": response_id(turn["turn_id"]),
            "object": "response",
            "created_at": epoch_s(turn["accepted_at"]),
            "status": status,
            "background": self.background,
            "error": None if error is None else {"code": "server_error", "message": error["message"]},
            "incomplete_details": {"reason": _INCOMPLETE[finish_reason(turn)]} if status == "incomplete" else None,
            "instructions": None,
            "metadata": turn.get("metadata") or {},
            "model": self.agent,
            "output": [] if text is None else _output(turn, text, calls),
            "parallel_tool_calls": True,
            "previous_response_id": self.previous,
            "conversation": None if self.conversation is None else {"id": self.conversation},
            "tool_choice": "auto",
            "tools": [],
            "temperature": None,
            "top_p": None,
            "usage": response_usage(turn) if status in {"completed", "incomplete"} else None,
        }


def status_of(turn: dict[str, Any]) -> str:
    """The Responses API's name for a turn's status."""
    if turn["status"] == "done" and finish_reason(turn) in _INCOMPLETE:
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
        yield _encode("error", rewound())
        return
    except PerdureError as error:
        yield _encode("error", body_of(error))
        return
    yield _encode("error", stopping())


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

    def begin(self) -> Iterator[bytes]:
        """The events before the text."""
        running = self._response.body(self._turn, status="in_progress")
        item = _item(self._turn, None, "in_progress")
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
            case AnswerEnded(turn):
                return self.end(turn)
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
            item = _reasoning(self._turn, (), "in_progress")
            yield from self._event(self._advance(_MARK), "response.output_item.added", output_index=1, item=item)
        place = {"item_id": _reasoning_id(self._turn), "output_index": 1, "summary_index": len(self._calls)}
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

    def end(self, turn: dict[str, Any]) -> Iterator[bytes]:
        """The last deltas of a settled turn, then its closing events.

        Raises:
            Rewound: the client's sequence number belongs to other text.
        """
        self._turn = turn
        if turn["status"] != "done":  # the Responses API has no event for a cancelled response, only a status
            kind = "response.failed" if status_of(turn) == "failed" else "response.incomplete"
            yield from self._event(self._last + 1, kind, response=self._response.body(turn))
            return
        yield from self.more("", whole=True)
        item = _item(turn, self._text, "completed")
        closing: tuple[tuple[str, dict[str, Any]], ...] = (
            ("response.output_text.done", {**self._place, "text": self._text, "logprobs": []}),
            ("response.content_part.done", {**self._place, "part": item["content"][0]}),
            *(
                ("response.output_item.done", {"output_index": index, "item": each})
                for index, each in enumerate(_output(turn, self._text, self._calls))
            ),
            (f"response.{status_of(turn)}", {"response": self._response.body(turn, self._text, self._calls)}),
        )
        for kind, data in closing:
            yield from self._event(self._last + 1, kind, **data)
        if not self._known:  # the client's sequence number is above all numbers of this text
            raise Rewound

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": _item_id(self._turn), "output_index": 0, "content_index": 0}

    def _event(self, number: int, kind: str, **data: Any) -> Iterator[bytes]:
        self._last = number
        self._known |= number == self._after
        if number <= self._after:
            return
        if not self._known:
            raise Rewound
        yield _encode(kind, {"type": kind, "sequence_number": number, **data})


def _item(turn: dict[str, Any], text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": _item_id(turn), "type": "message", "role": "assistant", "status": status, "content": content}


def _output(turn: dict[str, Any], text: str, calls: Sequence[str]) -> list[dict[str, Any]]:
    """The items of a response. The message is first, because its index must be known before the first tool call."""
    return [_item(turn, text, "completed"), *([_reasoning(turn, calls, "completed")] if calls else [])]


def _reasoning(turn: dict[str, Any], calls: Sequence[str], status: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": line} for line in calls]
    return {"id": _reasoning_id(turn), "type": "reasoning", "summary": summary, "status": status}


def _reasoning_id(turn: dict[str, Any]) -> str:
    return f"rs_{turn['turn_id'].replace('-', '')}"


def _item_id(turn: dict[str, Any]) -> str:
    return f"msg_{turn['turn_id'].replace('-', '')}"


def _encode(kind: str, value: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
