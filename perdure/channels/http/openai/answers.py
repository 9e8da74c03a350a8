"""The answer to a request as a sequence of text parts, from the events of its turn.

A turn may have several steps with text; a blank line separates their texts. An OpenAI stream cannot withdraw text.
`follow` therefore raises `Rewound` if a step's text is withdrawn after a part of the text was yielded.

An answer is an exchange (`turns.calls.client`): it ends with the turn, or where the turn waits for the client.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from perdure.channels.http.openai.wire import is_cut_off
from perdure.database.engine import Executor
from perdure.events.event import Event, EventKind
from perdure.tools.registry import STAFF
from perdure.turns import queries
from perdure.turns.calls.client import ClientCall, Exchange, Stop, joined, read_stops, stop_of, used_in
from perdure.turns.committed import Committed, read_committed
from perdure.turns.reading import SETTLED, read_turn

_BETWEEN = "\n\n"
_LONGEST_CALL = 300


class Rewound(Exception):
    """Text that was sent to the client was withdrawn from the answer."""


@dataclass(frozen=True, slots=True)
class Text:
    """The next part of the answer's text or, if `progress` is true, a status line outside the answer."""

    text: str
    progress: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """No event arrived for one keep-alive interval."""


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The turn is settled, or waits for the client: to run `calls`, or for the user's answer to a question.

    `used` are the tokens of the answer.
    """

    turn: dict[str, Any]
    calls: tuple[ClientCall, ...] = ()
    used: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """A line about a committed tool call. It follows the text of the call's step, both live and in a replay."""

    line: str


Part = Text | Called | Idle | AnswerEnded


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a turn has come: the turn, all of its stops, and the one that ends the exchange, if it has come to it.

    The exchange is that of the turn, which the message may have joined.
    """

    turn: dict[str, Any]
    stops: Sequence[Stop]
    stop: Stop | None
    exchange: Exchange


async def follow(  # noqa: C901 (one event after another)
    events: AsyncIterator[Event | None],
    exchange: Exchange,
    read: Callable[[], Awaitable[Progress]],
    used: Callable[[Progress | None], Awaitable[dict[str, Any]]],
) -> AsyncIterator[Part]:
    """The parts of an answer, given the events of its turn from the answer's beginning.

    `read` reads the turn, and `used` the tokens of the answer: up to a stop, or the turn's end.

    Ends without `AnswerEnded` if the gateway stops.

    Raises:
        Rewound: text that was already yielded was withdrawn from the answer.
    """
    answer, number, after = _Answer(), exchange.after, exchange.after
    may_join = exchange.may_join
    async for event in events:
        if event is None:
            yield Idle()
            continue
        if may_join and event.kind in {EventKind.DELTA, EventKind.MESSAGE}:
            after, may_join = (await read()).exchange.after, False
        number += event.kind is EventKind.MESSAGE
        if number + (event.kind is not EventKind.MESSAGE) <= after and event.kind is not EventKind.DONE:
            continue  # it belongs to an earlier answer of the turn that the message has joined
        progress = await read() if _may_stop(event) else None
        stops = () if progress is None else progress.stops
        if event.kind is EventKind.DONE:
            turn = dict(event.data)
            if answer.is_withdrawn and not is_cut_off(turn):
                raise Rewound
            is_known = turn["usage"] is not None and not exchange.after
            yield AnswerEnded(turn, used=turn["usage"] if is_known else await used(None))
            return
        for part in answer.parts(event, next((each for each in stops if each.number == number), None)):
            yield part
        stop = None if progress is None else progress.stop
        if progress is not None and stop is not None and stop.number <= number:
            if stop.question is not None:
                yield answer.said(stop.question)
            yield AnswerEnded(progress.turn, calls_of(stop), await used(progress))
            return


def _may_stop(event: Event) -> bool:
    """Whether the turn may have come to a stop: it has parked, or a message has calls."""
    match event.kind:
        case EventKind.STATE:
            return bool(event.data["status"] == "parked")
        case EventKind.MESSAGE:
            return bool(event.data.get("tool_calls"))
        case _:
            return False


@dataclass(slots=True)
class CommittedAnswer:
    """An answer as far as it is committed: the same texts and calls as those that `follow` yields.

    `stop` is the stop that ends it, `client_calls` are the calls that the client is to run, and `used` has its tokens.
    """

    turn: dict[str, Any]
    stops: Sequence[Stop] = ()
    texts: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    stop: Stop | None = None
    client_calls: Sequence[ClientCall] = ()
    used: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return _BETWEEN.join(self.texts)

    @property
    def is_over(self) -> bool:
        """Whether nothing is missing."""
        return self.stop is not None or self.turn["status"] in SETTLED

    def add(self, page: Committed) -> None:
        """Add the texts and the calls of the turn's next messages."""
        for number, each in enumerate(page.messages, start=page.after + 1):
            if self.stop is not None and number > self.stop.number:
                return
            if each["role"] == "assistant":
                self.calls += lines_of(each, next((stop for stop in self.stops if stop.number == number), None))
                if "error" not in each and each["content"].strip():
                    self.texts.append(each["content"])


def answer_bytes(executor: Executor, exchange: Exchange) -> int:
    """The memory for an answer and for the response with it: the turn's texts, the whole text and two JSONs."""
    return 4 * int(executor.run(queries.ANSWER_BYTES, {"turn_id": exchange.turn_id})[0].size)


def read_answer(executor: Executor, exchange: Exchange) -> CommittedAnswer:
    """Read a turn and the answer. Tools' results, which may be long, are read page by page and not kept.

    Raises:
        NotFound: there is no such turn.
    """
    progress = read_progress(executor, exchange)
    stop, exchange = progress.stop, progress.exchange
    # A turn that has gone on since still ends the answer with its stop.
    turn = progress.turn if stop is None else {**progress.turn, "status": "parked", "error": None, "reply": None}
    page = read_committed(executor, exchange.turn_id, exchange.after)
    answer = CommittedAnswer(
        turn if stop is not None else page.turn, progress.stops, stop=stop, client_calls=calls_of(stop)
    )
    answer.add(page)
    while not page.is_last and not (stop is not None and page.count >= stop.number):
        page = read_committed(executor, exchange.turn_id, page.count)
        answer.turn = turn if stop is not None else page.turn
        answer.add(page)
    if stop is not None and stop.question is not None:
        answer.texts.append(stop.question)
    answer.used = answer.turn["usage"]
    if answer.is_over and (stop is not None or exchange.after or answer.used is None):
        answer.used = used_in(executor, exchange, stop)
    return answer


def read_progress(executor: Executor, exchange: Exchange) -> Progress:
    """How far the turn of an exchange has come.

    Raises:
        NotFound: there is no such turn.
    """
    turn = read_turn(executor, exchange.turn_id)
    turn_id = UUID(turn["turn_id"])  # of another turn, if the turn's message has joined it
    stops, exchange = read_stops(executor, turn_id), joined(executor, exchange, turn_id)
    return Progress(turn, stops, stop_of(stops, exchange, turn["status"]), exchange)


def calls_of(stop: Stop | None) -> tuple[ClientCall, ...]:
    """The calls that the client is to run."""
    return () if stop is None else tuple(call for call in stop.calls if call.is_begun)


def lines_of(message: Mapping[str, Any], stop: Stop | None) -> list[str]:
    """The lines about the calls of a message, without those that the client runs."""
    own = {call.position for call in stop.calls} if stop is not None else set()
    return [_line(call) for position, call in enumerate(message.get("tool_calls", ())) if position not in own]


class _Answer:
    def __init__(self) -> None:
        self._has_text = False
        """Whether an earlier step had text."""
        self._step = ""
        self._passed = 0
        """The number of characters of the current step's text that were yielded."""
        self.is_withdrawn = False
        """Whether yielded text was withdrawn. It stands if the provider's filter stopped the reply, as with OpenAI."""

    def said(self, question: str) -> Text:
        """The question that ends the answer."""
        self._require_standing()
        return Text(f"{_BETWEEN if self._has_text else ''}{question}")

    def parts(self, event: Event, stop: Stop | None) -> list[Part]:
        match event.kind:
            case EventKind.DELTA:
                return self._grow(self._step + event.data["text"])
            case EventKind.REWIND:
                return self._withdraw()
            case EventKind.MESSAGE if event.data["role"] == "assistant":
                if "error" in event.data:
                    return self._withdraw()  # the text of an error is no part of the answer
                self._require_standing()
                return [*self._commit(event.data["content"]), *map(Called, lines_of(event.data, stop))]
            case EventKind.APPROVAL_REQUIRED | EventKind.PROGRESS:
                return [_progress(event)]
            case _:
                return []

    def _grow(self, step: str) -> list[Part]:
        """Set the current step's text to `step`. Returns the text that is not yielded yet, as one part.

        Returns no part if `step` is blank or all of it was yielded.
        """
        self._step = step
        if not step.strip() or len(step) == self._passed:
            return []
        self._require_standing()
        before = _BETWEEN if self._has_text and not self._passed else ""
        text, self._passed = before + step[self._passed :], len(step)
        return [Text(text)]

    def _commit(self, content: str) -> list[Part]:
        if not content.startswith(self._step[: self._passed]):
            raise Rewound
        parts = self._grow(content)
        self._has_text |= bool(content.strip())
        self._step, self._passed = "", 0
        return parts

    def _withdraw(self) -> list[Part]:
        self.is_withdrawn |= self._passed > 0
        self._step, self._passed = "", 0
        return []

    def _require_standing(self) -> None:
        if self.is_withdrawn:
            raise Rewound


def _progress(event: Event) -> Text:
    """The line about a person for whom the turn waits, or about the progress of a call."""
    if event.kind is EventKind.APPROVAL_REQUIRED:
        by = " by staff" if event.data["approver"] == STAFF else ""
        return Text(f"waiting for approval of {event.data['tool']}{by}\n", progress=True)
    return Text(f"{event.data['tool']}: {event.data['text']}\n", progress=True)


def _line(call: Mapping[str, Any]) -> str:
    """The line about a tool call: the tool's name and the arguments, truncated."""
    arguments = call["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call['name']} {text[:_LONGEST_CALL]}\n"
