"""A turn's answer as a sequence of text parts, from the turn's events.

A turn may have several steps with text; a blank line separates their texts. An OpenAI stream cannot withdraw text.
`follow` therefore raises `Rewound` if a step's text is withdrawn after a part of the text was yielded.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from perdure.database.engine import Executor
from perdure.events.event import Event, EventKind
from perdure.tools.registry import STAFF
from perdure.turns import queries
from perdure.turns.committed import read_committed

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
    """The turn is settled."""

    turn: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Called:
    """A line about a committed tool call. It follows the text of the call's step, both live and in a replay."""

    line: str


Part = Text | Called | Idle | AnswerEnded


async def follow(events: AsyncIterator[Event | None]) -> AsyncIterator[Part]:
    """The parts of a turn's answer, given all events of the turn. Ends without `AnswerEnded` if the gateway stops.

    Raises:
        Rewound: text that was already yielded was withdrawn from the answer.
    """
    answer = _Answer()
    async for event in events:
        if event is None:
            yield Idle()
            continue
        for part in answer.parts(event):
            yield part


@dataclass(slots=True)
class CommittedAnswer:
    """The answer of a turn as far as it is committed: the same texts and calls as those that `follow` yields."""

    turn: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return _BETWEEN.join(self.texts)

    def add(self, messages: list[dict[str, Any]]) -> None:
        """Add the texts and the calls of the turn's next messages."""
        for each in messages:
            if each["role"] == "assistant":
                self.calls += map(_line, each.get("tool_calls", ()))
                if "error" not in each and each["content"].strip():
                    self.texts.append(each["content"])


def answer_bytes(executor: Executor, turn_id: UUID) -> int:
    """The memory for a turn's answer and for the response with it: the answer's texts, the whole text and two JSONs."""
    return 4 * int(executor.run(queries.ANSWER_BYTES, {"turn_id": turn_id})[0].size)


def read_answer(executor: Executor, turn_id: UUID) -> CommittedAnswer:
    """Read a turn and its answer. Tools' results, which may be long, are read page by page and not kept.

    Raises:
        NotFound: there is no such turn.
    """
    committed = read_committed(executor, turn_id)
    answer = CommittedAnswer(committed.turn)
    answer.add(committed.messages)
    while not committed.is_last:
        committed = read_committed(executor, turn_id, committed.count)
        answer.turn = committed.turn
        answer.add(committed.messages)
    return answer


class _Answer:
    def __init__(self) -> None:
        self._has_text = False
        """Whether an earlier step had text."""
        self._step = ""
        self._passed = 0
        """The number of characters of the current step's text that were yielded."""

    def parts(self, event: Event) -> list[Part]:
        match event.kind:
            case EventKind.DELTA:
                return self._grow(self._step + event.data["text"])
            case EventKind.REWIND:
                return self._withdraw()
            case EventKind.MESSAGE if event.data["role"] == "assistant":
                called = [Called(_line(call)) for call in event.data.get("tool_calls", ())]
                # The text of an error is no part of the answer.
                said = self._withdraw() if "error" in event.data else self._commit(event.data["content"])
                return [*said, *called]
            case EventKind.APPROVAL_REQUIRED:
                by = " by staff" if event.data["approver"] == STAFF else ""
                return [Text(f"waiting for approval of {event.data['tool']}{by}\n", progress=True)]
            case EventKind.DONE:
                return [AnswerEnded(dict(event.data))]
            case _:
                return []

    def _grow(self, step: str) -> list[Part]:
        """Set the current step's text to `step`. Returns the text that is not yielded yet, as one part.

        Returns no part if `step` is blank or all of it was yielded.
        """
        self._step = step
        if not step.strip() or len(step) == self._passed:
            return []
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
        if self._passed:
            raise Rewound
        self._step = ""
        return []


def _line(call: Mapping[str, Any]) -> str:
    """The line about a tool call: the tool's name and the arguments, truncated."""
    arguments = call["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call['name']} {text[:_LONGEST_CALL]}\n"
