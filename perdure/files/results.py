"""Files that tools return. A tool's result is text: a line stands for each file, and names it.

So what was recorded of a call, before a crash, after an approval or in a fork, is found again by its text alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.files.kinds import IMAGES
from perdure.files.parts import MAX_FILES, describe
from perdure.text.patterns import compiled


@dataclass(frozen=True, slots=True)
class File:
    """A file that a tool returns, alone or in a list or tuple with texts. The model gets it or a line about it.

    `media_type` only distinguishes kinds of text; what else it is, `data` shows.

    Example:
        >>> @tool(effect="pure")
        ... def chart(what: str) -> File:
        ...     '''Draw a chart.'''
        ...     return File(b"apples,3", name="chart.csv", media_type="text/csv")
        >>> seller = Agent("seller", "You sell apples.", tools=[chart])
        >>> ask(seller, "How many?", model=Scripted(call("chart", what="apples"), "Three.")).calls[0].result[:37]
        '[file: chart.csv, text/csv, 8 bytes; '
    """

    data: bytes = field(repr=False)
    name: str | None = None
    media_type: str | None = None


def describe_result(row: Row[Any]) -> str:
    """The line about a file that a tool returned. It names the file, by which `named_in` finds it."""
    name = row.name and row.name.replace(_NAMES, ", ")
    stored = {"type": "image" if row.media_type in IMAGES else "file", **row._asdict(), "name": name}
    return describe(stored, f"file {row.file_id}")


def named_in(text: str) -> list[tuple[UUID, int]]:
    """The files that a tool's result names, at most `MAX_FILES`, each with the end of its line.

    The text is untrusted: it may name any file. The caller uses only files of the turn's own user.
    """
    found = islice(_NAMED.finditer(text), MAX_FILES)
    return [(UUID(each["id"]), each.end()) for each in found]


def ending_files(text: str) -> tuple[str, list[tuple[UUID, str]]]:
    r"""A text without the lines about files that end it, and the files, at most `MAX_FILES`, each with its line.

    The text is untrusted, as in `named_in`.

    Example:
        >>> ending_files("Two circles.\n[image: image/png, 68 bytes; file 01931e71-20c4-7a05-8f3b-5d0f6a1e9b42]")[0]
        'Two circles.'
    """
    lines = text.rstrip().split("\n")
    found = list[tuple[UUID, str]]()
    while lines and len(found) < MAX_FILES and (match := _NAMED.fullmatch(lines[-1])) is not None:
        found.insert(0, (UUID(match["id"]), lines.pop()))
    return ("\n".join(lines), found) if found else (text, [])


_NAMES = "; file "
"""Stands before the id of a file. No name of a file contains it, so that a name does not name another file."""

_NAMED = compiled(
    r"\[(?:image|file): [^\n]{1,400}?; file (?P<id>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\]"
)
