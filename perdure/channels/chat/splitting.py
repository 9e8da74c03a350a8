"""Splits a long text into messages of a limited length, between lines where possible.

A code block that spans parts is closed at the end of each part and opened again, with its language, in the next one.
"""

from __future__ import annotations

_FENCE = "```"
_LONGEST_OPENING = 40
"""The longest opening line of a code block that is repeated; a longer line is replaced by a bare fence."""


def split(text: str, most: int) -> list[str]:
    """`text` in parts of at most `most` characters (100 or more). Blank text has no parts."""
    parts: list[str] = []
    rest, opening = text.strip("\n"), ""
    while rest.strip():
        room = most - (len(_FENCE) + 1)
        cut = len(rest) if len(opening) + len(rest) <= most else _cut(rest, room - len(opening))
        part = opening + rest[:cut].rstrip("\n" if opening else " \n")
        rest = rest[cut:]
        rest = rest[1:] if rest.startswith(" ") else rest.lstrip("\n")
        opening = _left_open(part)
        if opening and rest.strip():
            part += f"\n{_FENCE}"
        if part.strip():
            parts.append(part)
    return parts


def _cut(text: str, room: int) -> int:
    """The length of the next part.

    It ends a paragraph, line or word in the last half of `room`; otherwise it is `room`.
    """
    for separator in ("\n\n", "\n", " "):
        found = text.rfind(separator, room // 2, room)
        if found > 0:
            return found
    return room


def _left_open(part: str) -> str:
    """The opening line, with its newline, of a code block that `part` does not close; empty if all are closed."""
    opening = ""
    for line in part.split("\n"):
        if line.lstrip().startswith(_FENCE):
            if opening:
                opening = ""
            elif line.count(_FENCE) == 1:
                opening = f"{line.strip() if len(line.strip()) <= _LONGEST_OPENING else _FENCE}\n"
    return opening
