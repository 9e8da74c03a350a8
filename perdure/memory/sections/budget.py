"""What of all that is remembered goes into a prompt: sections, each within its budget of tokens.

Pure: what was found comes in, text goes out; `briefing` in `turns` fetches and calls. The laws:
no section exceeds its budget, whatever is in it; what goes first is the oldest or the least
relevant; the newest turn is never cut, and turns are kept or left out whole, so that a tool's
call is never parted from its result. Tokens are an estimate that errs on the high side: no
table of a vendor's is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TypeVar

from perdure.models.protocol import ToolSchema
from perdure.text.quoting import Quoter, quoted

_BYTES_PER_TOKEN = 3
_SCHEMA_TOKENS = 8
_CUT = " […]"

Turn = TypeVar("Turn")


@dataclass(frozen=True, slots=True)
class Section:
    """Something remembered: `pieces` of text, the most worth keeping first, within `budget` tokens.

    `mark` says what kind of quotation it is. `backwards` shows the first piece last, as what is
    newest stands last in a conversation.
    """

    mark: str
    title: str
    pieces: Sequence[str]
    budget: int
    backwards: bool = False


def estimate_tokens(text: str) -> int:
    """Tokens of `text` by a conservative estimate: one for every three bytes of UTF-8 begun."""
    return -(-_size(text) // _BYTES_PER_TOKEN)


def render(section: Section, quoter: Quoter | None = None) -> str:
    """The section as a prompt has it, quoted by the prompt's `quoter`; empty if the budget holds no part of a piece."""
    kept = fitting(section)
    quoter = quoter or Quoter()
    return quoter.quote(section.mark, section.title, kept[::-1] if section.backwards else kept)


def fitting(section: Section) -> list[str]:
    """The first of its pieces, as far as the budget goes; of the first one at least what it bears."""
    room = section.budget * _BYTES_PER_TOKEN - _size(quoted(section.mark, section.title, ["."])) + 1
    spent = accumulate(_size(piece) + 1 for piece in section.pieces)
    kept = [piece for piece, total in zip(section.pieces, spent, strict=True) if total - 1 <= room]
    if not kept and section.pieces:
        kept = [head for head in [_head(section.pieces[0], room)] if head]
    return kept


def cut_to(text: str, budget: int) -> str:
    """`text` within `budget` tokens; where something was cut off, that is seen at its end."""
    return text if estimate_tokens(text) <= budget else _head(text, budget * _BYTES_PER_TOKEN)


def latest(turns: Sequence[Turn], cost: Callable[[Turn], int], budget: int) -> list[Turn]:
    """The newest of `turns`, in order, as far back as the budget goes; the last one whatever it costs."""
    spent = accumulate(cost(turn) for turn in reversed(turns))
    fitting = sum(1 for _ in takewhile(lambda total: total <= budget, spent))
    return list(turns[-max(1, fitting) :])


def affordable(tools: Sequence[ToolSchema], budget: int) -> tuple[ToolSchema, ...]:
    """The first of `tools`, as far as the budget goes; an author names the most important first."""
    spent = accumulate(_schema_tokens(tool) for tool in tools)
    return tuple(tool for tool, total in zip(tools, spent, strict=True) if total <= budget)


def _schema_tokens(tool: ToolSchema) -> int:
    written = json.dumps(tool.parameters, ensure_ascii=False)
    return estimate_tokens(tool.name) + estimate_tokens(tool.description) + estimate_tokens(written) + _SCHEMA_TOKENS


def _head(text: str, room: int) -> str:
    """As much of `text` as `room` bytes hold together with the sign that it was cut; nothing if not even that."""
    room -= _size(_CUT)
    return _encoded(text)[:room].decode("utf-8", "ignore") + _CUT if room > 0 else ""


def _size(text: str) -> int:
    return len(_encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # an author's own text may hold halves of characters
