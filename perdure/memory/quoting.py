"""How a prompt quotes what was said or learnt before: as what it is, never as what to do.

What is recalled is data from outside. It stands between marks that nothing inside it can close,
and whoever learns from a conversation takes such quotations out first (`without_quotations`): what
the system itself had recalled is never learnt again as if it were new.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.patterns import SPACE, compiled

CONVERSATION = "previous_conversation"
MEMORY = "recalled_memory"
_MARKS = f"{CONVERSATION}|{MEMORY}"

_INSIDE = compiled(rf"<([{SPACE}]*/?[{SPACE}]*(?:{_MARKS}))", ignore_case=True)
_QUOTATION = compiled(
    "|".join(f"<{mark}>.*?(?:</{mark}>|$)" for mark in (CONVERSATION, MEMORY)), ignore_case=True, dot_all=True
)


def quoted(mark: str, title: str, pieces: Sequence[str]) -> str:
    """`pieces`, a line or more each, between two `mark`s under `title`; nothing if there are none."""
    inside = _INSIDE.sub(lambda found: f"[{found[1]}", "\n".join(pieces))  # as long as before: budgets count on it
    return f"{title}:\n<{mark}>\n{inside}\n</{mark}>" if inside else ""


def without_quotations(text: str) -> str:
    """`text` without what is quoted in it; a quotation that was cut off goes to its end."""
    return _QUOTATION.sub(lambda _: "", text)
