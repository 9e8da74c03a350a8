"""Output of commands: a table on a terminal, tab-separated lines elsewhere, JSON with `--json`.

Text of users, models and tools may contain escape sequences that would rewrite the terminal, so commands print visible
symbols in place of control characters.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MOST_LISTED = 100_000
"""The most rows that a command lists."""

_PICTURES = {
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\N{SYMBOL FOR DELETE}",
}
"""The symbol printed for each control character. The symbols for U+0000 to U+001F begin at U+2400."""

_GAP = 2
"""The space between two columns of a table."""
_LONGEST_WORD = 64
"""Longer words of a table may be broken."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def write_json(value: Any) -> None:
    write_document([json.dumps(value, ensure_ascii=False, indent=2) + "\n"])


def write_document(parts: Iterable[str]) -> None:
    """Print text for programs: in UTF-8, whatever the encoding of the locale is."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.stdout.writelines(parts)
    sys.stdout.flush()


def prints_on_stderr() -> AbstractContextManager[object]:
    """During the block, what Python code prints goes to stderr: stdout is for the command's own output.

    Load the modules of agents in such a block, and run their hooks: they may print.
    """
    return redirect_stdout(sys.stderr)


def printable(text: str) -> str:
    """`text` with a visible symbol for each control character except line breaks and tabs."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def write_text(text: str) -> None:
    """Print untrusted text: unchanged into a pipe, `printable` on a terminal."""
    sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + "\n")
    sys.stdout.flush()


def write_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the members `columns` of each row.

    On a terminal, prints a table; elsewhere, tab-separated lines without headings. A table breaks lines between words
    only, so that ids can be copied. If the terminal is too narrow for that, each row is printed as a block of fields.
    """
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in cells)
        return
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console()
    widths = _widths(columns, cells, console.width)
    if widths is None:
        for row in cells:
            write_fields(dict(zip(columns, row, strict=True)))
            sys.stdout.write("\n")
        return
    headings = [Column(name, width=width) for name, width in zip(columns, widths, strict=True)]
    table = Table(*headings, box=None, header_style="bold", pad_edge=False)
    for row in cells:
        table.add_row(*(Text(value, overflow="fold") for value in row))
    console.print(table)


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The width of each column of a table that is at most `width` wide; `None` if a word would have to be broken."""
    from rich.cells import cell_len

    shown = [[name, *(row[at] for row in cells)] for at, name in enumerate(columns)]
    least = [
        max(min(cell_len(word), _LONGEST_WORD) for text in each for word in text.split() or [""]) for each in shown
    ]
    found = [max(map(cell_len, each)) for each in shown]
    excess = sum(found) + _GAP * (len(columns) - 1) - width
    while excess > 0:
        spare, widest = max((now - low and now, at) for at, (now, low) in enumerate(zip(found, least, strict=True)))
        if not spare:
            return None
        found[widest] -= 1
        excess -= 1
    return found


def write_fields(fields: Mapping[str, Any]) -> None:
    """Print each name and its value on a line."""
    width = max(map(len, fields)) if sys.stdout.isatty() else 0
    for name, value in fields.items():
        separator = "  " if width else "\t"
        sys.stdout.write(f"{name:<{width}}{separator}{_cell(value)}\n")


@contextmanager
def progress(task: str) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on stderr. Prints nothing if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        yield shown, shown.add_task(task, total=None)


def _cell(value: Any) -> str:
    """A value as printable text on one line; `-` for `None` and for an empty list."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    return " ".join(printable(str(value)).split())
