"""Parts of a long text for a service with a limit: cut between lines where possible, code blocks kept whole.

A code block that spans parts is closed at the end of each part and opened again, with its language, in the next one.
"""

from __future__ import annotations

_FENCE = "```"
_LONGEST_OPENING = 40
"""Characters of a fence's first line that are repeated; a longer one is repeated as the bare fence."""


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
    """Where to end a part: after a paragraph, a line or a word in the last half of the room, else at its end."""
    for separator in ("\n\n", "\n", " "):
        found = text.rfind(separator, room // 2, room)
        if found > 0:
            return found
    return room


def _left_open(part: str) -> str:
    """The first line of the code block that `part` leaves open, with its newline; empty without one."""
    opening = ""
    for line in part.split("\n"):
        if line.lstrip().startswith(_FENCE):
            if opening:
                opening = ""
            elif line.count(_FENCE) == 1:
                opening = f"{line.strip() if len(line.strip()) <= _LONGEST_OPENING else _FENCE}\n"
    return opening
