"""How a prompt quotes what was said or learnt before: as what it is, never as what to do.

What is recalled is data from outside. It stands between marks that nothing inside it can close,
and whoever learns from a conversation takes such quotations out first (`without_quotations`): what
the system itself had recalled is never learnt again as if it were new.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CONVERSATION = "previous_conversation"
MEMORY = "recalled_memory"
_MARKS = f"{CONVERSATION}|{MEMORY}"

_INSIDE = re.compile(rf"<(\s*/?\s*(?:{_MARKS}))", re.IGNORECASE)
_QUOTATION = re.compile(rf"<({_MARKS})>.*?(?:</\1>|\Z)", re.IGNORECASE | re.DOTALL)


def quoted(mark: str, title: str, pieces: Sequence[str]) -> str:
    """`pieces`, a line or more each, between two `mark`s under `title`; nothing if there are none."""
    inside = _INSIDE.sub(r"[\1", "\n".join(pieces))  # as long as before: budgets count on it
    return f"{title}:\n<{mark}>\n{inside}\n</{mark}>" if inside else ""


def without_quotations(text: str) -> str:
    """`text` without what is quoted in it; a quotation that was cut off goes to its end."""
    return _QUOTATION.sub("", text)
