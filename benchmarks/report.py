"""The result of a section, printed as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 112


@dataclass(frozen=True, slots=True)
class Rate:
    """Turns (or bare tasks) per second, and PostgreSQL's transactions and KiB of WAL for each turn or task."""

    per_s: float
    transactions: float
    wal_kib: float


@dataclass(frozen=True, slots=True)
class Section:
    """The result of one section. `method` describes the measurement. A key of `figures` contains the unit, if any."""

    name: str
    title: str
    method: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: dict[str, float]

    def document(self) -> dict[str, Any]:
        """The section as a JSON object."""
        return {
            "name": self.name,
            "title": self.title,
            "method": self.method,
            "figures": {key: round(value, 4) for key, value in self.figures.items()},
        }

    def show(self, console: Console) -> None:
        """Print the section."""
        table = Table(title=self.title, title_justify="left", title_style="bold", caption_justify="left")
        table.add_column(self.columns[0])
        for column in self.columns[1:]:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        console.print(self.method, style="dim")
        console.print()


def console() -> Console:
    """A console of fixed width, so that files and terminals get the same output."""
    return Console(width=_WIDTH, highlight=False)
