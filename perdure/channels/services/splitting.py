"""Splits a long text into parts of a limited length, between lines where possible.

A code block that spans several parts is closed at the end of each part. The next part opens the code block again, with
the same language.
"""

from __future__ import annotations

_FENCE = "```"
_LONGEST_OPENING = 40
"""The next part repeats the opening line of a code block if the line has at most this many characters.

If the line is longer, the next part opens the code block with a bare fence.
"""


def split(text: str, most: int) -> list[str]:
    """`text` in parts of at most `most` characters; `most` must be at least 100. Blank text has no parts."""
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

    The part ends at the last paragraph break in the second half of the first `room` characters. Without a paragraph
    break, it ends at the last line break; without a line break, at the last space; without a space, at `room`.
    """
    for separator in ("\n\n", "\n", " "):
        found = text.rfind(separator, room // 2, room)
        if found > 0:
            return found
    return room


def _left_open(part: str) -> str:
    """The opening line, newline included, of the code block that `part` leaves open; empty if none is open."""
    opening = ""
    for line in part.split("\n"):
        if line.lstrip().startswith(_FENCE):
            if opening:
                opening = ""
            elif line.count(_FENCE) == 1:
                opening = f"{line.strip() if len(line.strip()) <= _LONGEST_OPENING else _FENCE}\n"
    return opening
