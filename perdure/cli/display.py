"""What commands print: a table on a terminal, tab-separated lines elsewhere, JSON when asked.

Text of users, models and tools may hold escape sequences, with which it would write over
the terminal; they are made visible instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

_PICTURES = {
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\N{SYMBOL FOR DELETE}",
}
"""For each control character what is shown for it: the C0 controls have their pictures from U+2400 on, in order."""

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]


def write_json(value: Any) -> None:
    """Print `value` as one JSON document."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def printable(text: str) -> str:
    """`text` with its control characters, line breaks and tabs aside, as Unicode's pictures of them."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def write_text(text: str) -> None:
    """Print a foreign text: unchanged into a pipe, printable on a terminal."""
    sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + "\n")
    sys.stdout.flush()


def write_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows: a table on a terminal; elsewhere a line each, tabs between, without headings."""
    if not sys.stdout.isatty():
        for row in rows:
            sys.stdout.write("\t".join(_cell(value) for value in row) + "\n")
        return
    from rich.console import Console  # noqa: PLC0415 (only a terminal needs it)
    from rich.table import Table  # noqa: PLC0415 (as above)
    from rich.text import Text  # noqa: PLC0415 (as above)

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_cell(value), overflow="fold") for value in row))
    Console().print(table)


def write_fields(fields: Mapping[str, Any]) -> None:
    """Print names and values, a line each."""
    width = max(map(len, fields)) if sys.stdout.isatty() else 0
    for name, value in fields.items():
        separator = "  " if width else "\t"
        sys.stdout.write(f"{name:<{width}}{separator}{_cell(value)}\n")


def _cell(value: Any) -> str:
    """A value on one line."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    return " ".join(printable(str(value)).split())
