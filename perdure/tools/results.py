"""The result of a tool as text of limited length, in which a line stands for each file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from perdure.errors import InvalidRequest
from perdure.files.results import File
from perdure.text.untrusted import cut

Attach = Callable[[File], str]
"""Stores a file of a call, and returns the line that describes it."""

_LEAST_SHOWN = 200
"""A text next to a file is left out of a result in which it has room for fewer characters."""


class Piece(NamedTuple):
    """A piece of a result: a text, which may be cut, or the line of a file, which names the file and is not cut."""

    text: str
    is_file: bool = False


def described(result: Any, attach: Attach | None, limit: int) -> Any:
    """What a Python function returned, with the line of each `File` in its place.

    Raises:
        PerdureError: a file cannot be stored.
        ValueError: a file is inside of a dict.
    """
    if isinstance(result, File):
        return _attached(result, attach)
    if isinstance(result, dict) and any(isinstance(each, File) for each in result.values()):
        raise ValueError("it has a file inside. Return the File, or a list of texts and files")
    if not isinstance(result, list | tuple) or not any(isinstance(each, File) for each in result):
        return result
    return fitted([_piece(each, attach) for each in result], limit)


def fitted(pieces: Sequence[Piece], limit: int, gap: str = "\n") -> str:
    """The pieces with `gap` between them. Texts are cut, or left out, where they have more than `limit` characters."""
    room = limit - sum(len(line) + len(gap) for line, is_file in pieces if is_file)
    shown = []
    for text, is_file in pieces:
        if is_file:
            shown.append(text)
        elif len(text) < room or room > _LEAST_SHOWN:
            shown.append(text if len(text) < room else cut(text, room - 1))
            room -= len(shown[-1]) + len(gap)
    return gap.join(shown)


def _piece(part: Any, attach: Attach | None) -> Piece:
    return Piece(_attached(part, attach), is_file=True) if isinstance(part, File) else Piece(str(part))


def _attached(file: File, attach: Attach | None) -> str:
    if attach is None:
        raise InvalidRequest("this process stores no files.")
    return attach(file)
