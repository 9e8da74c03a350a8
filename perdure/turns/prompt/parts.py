"""The parts of a prompt, each within its token budget. All functions are pure.

No part exceeds its budget. The oldest or least relevant pieces are left out first. The newest turn is always kept.
Turns are kept or left out whole, so that a tool call keeps its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, takewhile
from typing import TypeVar

from perdure.models.protocol import ToolSchema
from perdure.text.quoting import Quoter, quoted
from perdure.text.tokens import BYTES_PER_TOKEN, beginning, size

Turn = TypeVar("Turn")


class Place(StrEnum):
    """Where a part stands in the prompt, in this order: what the next prompts have, too, before what they do not."""

    PAST = "past"
    """In the system prompt. It changes between sessions, and every few hours."""
    SUMMARY = "summary"
    """At the end of the system prompt. It changes when turns leave the prompt."""
    TURN = "turn"
    """Before the turn's message, in the prompts of this turn only."""


@dataclass(frozen=True, slots=True)
class Part:
    """A quoted part of a prompt: `pieces` of text, the most important first, within `budget` tokens.

    `mark` is the kind of quotation. `backwards`: the text has the pieces in reverse order, the most important last.
    `name` and, for each piece, `ids` and `scores` are for the record of the prompt.
    """

    mark: str
    title: str
    pieces: Sequence[str]
    budget: int
    backwards: bool = False
    place: Place = Place.TURN
    name: str = ""
    ids: Sequence[str] = ()
    scores: Sequence[float] = ()

    def told(self) -> list[str]:
        """The pieces that fit the budget, in the order of the text."""
        kept = fitting(self)
        return kept[::-1] if self.backwards else kept


def render(part: Part, quoter: Quoter) -> str:
    """The part's text, quoted by `quoter`; empty if the budget is too small for any piece.

    The text is the same each time the same `quoter` quotes the part.
    """
    return quoter.quote(part.mark, part.title, part.told())


def fitting(part: Part) -> list[str]:
    """The leading pieces that fit the budget together. If not even the first piece fits, returns its beginning."""
    if not part.pieces:
        return []
    room = part.budget * BYTES_PER_TOKEN - size(quoted(part.mark, part.title, ["."])) + 1
    spent = accumulate(size(piece) + 1 for piece in part.pieces)
    kept = [piece for piece, total in zip(part.pieces, spent, strict=True) if total - 1 <= room]
    return kept or [head for head in [beginning(part.pieces[0], room)] if head]


def latest(turns: Sequence[Turn], cost: Callable[[Turn], int], budget: int) -> list[Turn]:
    """The newest of `turns` that fit the budget, in order; the last turn is always included."""
    spent = accumulate(cost(turn) for turn in reversed(turns))
    fitting = sum(1 for _ in takewhile(lambda total: total <= budget, spent))
    return list(turns[-max(1, fitting) :])


def affordable(tools: Sequence[ToolSchema], budget: int) -> tuple[ToolSchema, ...]:
    """The leading `tools` that fit the budget together. An agent lists its most important tools first."""
    spent = accumulate(tool.tokens for tool in tools)
    return tuple(tool for tool, total in zip(tools, spent, strict=True) if total <= budget)
