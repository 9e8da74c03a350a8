"""Titles of conversations that no person and no model wrote: the first sentence of the first message."""

from __future__ import annotations

from perdure.text.patterns import SPACE, compiled
from perdure.text.untrusted import first_line

MAX_CHARS = 80
"""The maximum length of a conversation's title, in characters."""

_WITH_DOCUMENTS = "### Task:"
_DOCUMENTS_END = "</context>"
"""Open WebUI puts its instructions and the documents of a chat before what the user wrote."""

_READ_CHARS = 10 * MAX_CHARS
_SHORTEST = 8
"""The minimum length of a title that ends before the line does, in characters: "Hi." or "1." is not a whole title."""

# Marks of Markdown, and the speakers' names with which transcripts are quoted.
_BEFORE = compiled(rf"(?i)^(?:[{SPACE}#>*_`~\x{{2022}}-]|(?:user|assistant|tool|system|human|ai)[{SPACE}]*:)+")
_END = compiled(rf"[.!?\x{{2026}}][\"'\x{{201d}}\x{{2019}})]*[{SPACE}]|[\x{{3002}}\x{{ff01}}\x{{ff1f}}]")


def title_of(text: str) -> str:
    """The first sentence or line of `text`, cut to `MAX_CHARS`, without a full stop that another sentence follows.

    >>> title_of("## Plan my trip to Rome. It is in May.")
    'Plan my trip to Rome'
    >>> title_of("user: What did I say? tool: 2026-05-02")
    'What did I say?'
    """
    said = text.rpartition(_DOCUMENTS_END)[2] if text.startswith(_WITH_DOCUMENTS) else text
    read = (said if said.strip() else text)[: 10 * _READ_CHARS]
    before = _BEFORE.search(read)
    line = first_line(read[before.end() :] if before else read, _READ_CHARS) or first_line(read, _READ_CHARS)
    end = next((found.end() for found in _END.finditer(line) if found.start() >= _SHORTEST), None)
    return first_line(line if end is None else line[:end].strip().removesuffix("."), MAX_CHARS)
