"""Splits a long text into parts that a chat service accepts, between lines where possible.

A code block that spans several parts is closed at the end of each part. The next part opens the code block again, with
the same language. No part ends within a character that people see as one, such as an emoji of several code points.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

_FENCE = "```"
_LONGEST_OPENING = 40
"""The next part repeats the opening line of a code block if the line has at most this many characters.

If the line is longer, the next part opens the code block with a bare fence.
"""

_LONGEST_CLUSTER = 64
"""Code points after which a character of several code points is cut after all."""

_PRECISION = 64
"""A part may be shorter than necessary by one character of this many."""

_JOINER = "\u200d"


def units(text: str) -> int:
    """The length of a text in UTF-16 code units, in which chat services count."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def split(text: str, most: int, length: Callable[[str], int] = len) -> list[str]:
    """`text` in parts of at most `most`, as `length` counts; `most` must be at least 100. Blank text has no parts.

    `length` counts a part as the service does, with what the service's markup adds. It may not shrink as a text grows,
    except for a few characters of markup. It may be slow, so all of its calls together measure a few times the text: a
    rest of more than twice `most` is not measured as a whole.
    """
    parts: list[str] = []
    rest, opening = text.strip("\n"), ""
    while rest.strip():
        is_last = len(rest) <= 2 * most and length(opening + rest) <= most
        cut = len(rest) if is_last else _cut(rest, _room(rest, opening, most, length))
        part = opening + rest[:cut].rstrip("\n" if opening else " \n")
        rest = rest[cut:]
        rest = rest[1:] if rest.startswith(" ") else rest.lstrip("\n")
        opening = _left_open(part)
        if opening and rest.strip():
            part += f"\n{_FENCE}"
        if part.strip():
            parts.append(part)
    return parts


def _room(rest: str, opening: str, most: int, length: Callable[[str], int]) -> int:
    """How many characters of `rest` fit into a part that begins with `opening` and may have to close a code block.

    A little less than the most that fit, if that takes fewer calls of `length`.
    """

    def fits(number: int) -> bool:
        return length(f"{opening}{rest[:number]}\n{_FENCE}") <= most

    low, high = 1, min(len(rest), most)
    middle = high - len(opening) - len(_FENCE) - 1  # fits, unless the markup adds to the text
    while high - low > most // _PRECISION:
        middle = max(middle, low + 1)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    while low > 1 and not fits(low):  # the markup made an earlier end longer than a later one
        low -= 1
    return low


def _cut(text: str, room: int) -> int:
    """The length of the next part.

    The part ends at the last paragraph break in the second half of the first `room` characters. Without a paragraph
    break, it ends at the last line break; without a line break, at the last space; without a space, at `room`.
    """
    for separator in ("\n\n", "\n", " "):
        found = text.rfind(separator, room // 2, room)
        if found > 0:
            return found
    for whole in range(room, max(room - _LONGEST_CLUSTER, 0), -1):
        if not _continues(text, whole):
            return whole
    return room


def _continues(text: str, at: int) -> bool:
    """Whether the characters before and after the position `at` are shown as one."""
    before, after = text[at - 1], text[at : at + 1]
    if not after:
        return False
    if _JOINER in {before, after} or unicodedata.category(after) in {"Mn", "Mc", "Me"} or _is_modifier(after):
        return True
    if before == "\r" and after == "\n":
        return True
    flags = 0
    while flags < at and _is_flag(text[at - 1 - flags]):
        flags += 1
    return _is_flag(after) and flags % 2 == 1


def _is_modifier(character: str) -> bool:
    """A skin tone, or a tag of a flag."""
    return "\U0001f3fb" <= character <= "\U0001f3ff" or "\U000e0020" <= character <= "\U000e007f"


def _is_flag(character: str) -> bool:
    """Half of a flag."""
    return "\U0001f1e6" <= character <= "\U0001f1ff"


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
