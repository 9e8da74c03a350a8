"""Output of commands: a table on a terminal, tab-separated lines elsewhere, JSON with `--json`.

Text of users, models and tools may contain escape sequences that would rewrite the terminal, so commands print visible
symbols in place of control characters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PICTURES = {
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\N{SYMBOL FOR DELETE}",
}
"""The symbol printed for each control character. The symbols for U+0000 to U+001F begin at U+2400."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def printable(text: str) -> str:
    """`text` with a visible symbol for each control character except line breaks and tabs."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def write_text(text: str) -> None:
    """Print untrusted text: unchanged into a pipe, `printable` on a terminal."""
    sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + "\n")
    sys.stdout.flush()


def write_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows: as a table on a terminal, elsewhere as tab-separated lines without headings."""
    if not sys.stdout.isatty():
        for row in rows:
            sys.stdout.write("\t".join(_cell(value) for value in row) + "\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_cell(value), overflow="fold") for value in row))
    Console().print(table)


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
