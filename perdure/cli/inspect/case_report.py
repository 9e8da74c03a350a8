"""Prints a report of a run that prunes the CaseBank: counts, then the action and the reason for each case.

The texts of two duplicates are truncated and printed next to each other; `perdure cases show` prints a case in full.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleRenderable
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from perdure.casebank.plan.policy import Action
from perdure.cli.display import printable

_HEADINGS = {
    Action.REMOVE: "Removed: they fail too often",
    Action.MERGE: "Merged into a more used duplicate",
    Action.ARCHIVE: "Archived: they are not used",
    Action.SPARE: "Spared",
}
_COUNTS = ("removed", "merged", "archived")
_TIMES = ("started_at", "planned_at", "notified_at", "expires_at", "finished_at")
_LONGEST = 300
_WIDTH = 110
_INDENT = 4


def write_report(run: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> None:
    """Print a run from `read_run`, then its lines from `read_report`, each as soon as it is read."""
    console = _console()
    console.print(_head(run))
    action, number = None, 0
    for line in lines:
        if line["action"] != action:
            action, number = line["action"], 0
            console.print(f"\n{_HEADINGS[Action(line['action'])]}", style="bold")
        number += 1
        for part in _case(number, line):
            console.print(part)


def _console() -> Console:
    """A console as wide as the terminal, or `_WIDTH` columns wide if stdout is not a terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH)


def _head(run: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    kind = "dry run" if run["dry_run"] else "run"
    rows: list[tuple[str, Any]] = [(kind, run["run_id"]), ("phase", _phase(run))]
    rows += [("plan", _summary(run["plan"])), ("outcome", _summary(run["outcome"]))]
    rows += [(name.removesuffix("_at"), run[name]) for name in _TIMES]
    rows += [("decided by", run["decided_by"]), ("error", run["error"])]
    for name, value in rows:
        if value is not None:
            table.add_row(name, _text(str(value)))
    return table


def _phase(run: Mapping[str, Any]) -> str:
    return f"{run['phase']}, {run['done']} of {run['total']}" if run["under_way"] and run["total"] else run["phase"]


def _summary(counted: Mapping[str, Any] | None) -> str | None:
    if counted is None:
        return None
    counts = [f"{counted[f'{name}_cases']:,} {name}" for name in _COUNTS]
    return ", ".join([*counts, f"{len(counted['details']['spared']):,} spared"])


def _case(number: int, line: Mapping[str, Any]) -> Iterator[ConsoleRenderable]:
    """The lines for one case: its id, the reason for the planned action, and its question.

    If the case was spared when the plan was applied, a line says why. For a duplicate, a table compares the questions
    and answers of both cases.
    """
    yield _text(f"{number:>3}. {line['case_id']}: {line['reason']}")
    if line["outcome_reason"] is not None:
        yield _indented(_text(f"spared when the plan was applied: {line['outcome_reason']}"))
    if line["keeper_id"] is None:
        yield _indented(_text(_cut(line["query"])))
    else:
        yield _indented(_side_by_side(line))


def _side_by_side(line: Mapping[str, Any]) -> Table:
    """A table that compares a case with the kept case that it is merged into."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row("", _text(line["case_id"]), _text(f"{line['keeper_id']} (kept)"))
    table.add_row("asked", _text(_cut(line["query"])), _text(_cut(line["keeper_query"])))
    table.add_row("answer", _text(_cut(line["response_text"])), _text(_cut(line["keeper_response_text"])))
    return table


def _indented(part: ConsoleRenderable) -> Padding:
    return Padding(part, (0, 0, 0, _INDENT + 1))


def _text(text: str) -> Text:
    """`text` without line breaks and control characters, wrapped at the console's width."""
    return Text(printable(" ".join(text.split())), overflow="fold")


def _cut(text: str | None) -> str:
    if text is None:
        return "(erased)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
