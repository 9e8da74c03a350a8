"""The command line: `python -m benchmarks [--only NAME,NAME] [--quick] [--json]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import psutil
from rich.console import Console

from benchmarks import (
    adapted,
    backlog,
    breaker,
    casebank,
    context,
    gateway,
    history,
    models,
    prefix,
    recall,
    recall_at_scale,
    sharing,
    statements,
    streaming,
    throughput,
    waiting,
)
from benchmarks.crashes import section as crashes
from benchmarks.report import Section, console
from benchmarks.setup import BenchmarkFailed, Progress, Setup, setup

SECTIONS: dict[str, Callable[[Setup], Section]] = {
    module.NAME: module.measure
    for module in (
        throughput,
        backlog,
        history,
        waiting,
        sharing,
        statements,
        breaker,
        gateway,
        models,
        adapted,
        streaming,
        prefix,
        context,
        recall,
        recall_at_scale,
        casebank,
        crashes,
    )
}


def main() -> int:
    """Run the selected sections and print their results; returns the exit status, 1 if a section failed."""
    given = _arguments()
    wanted = given.only or list(SECTIONS)
    found: list[Section] = []
    machine = _machine()
    if not given.json:
        console().print(" · ".join(machine.values()), style="bold")
    try:
        with _showing_progress() as progress, setup(progress, quick=given.quick) as made:
            for name in wanted:
                section = SECTIONS[name](made)
                found.append(section)
                if not given.json:
                    section.show(console())
    except BenchmarkFailed as error:
        print(error, file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps({**machine, "sections": [section.document() for section in found]}, indent=2))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the performance of perdure on this machine."
    )
    parser.add_argument(
        "--only", action="extend", type=_sections, metavar="A,B", help=f"run only these sections: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--quick", action="store_true", help="do a tenth of the work; the figures are not meaningful")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def _sections(names: str) -> list[str]:
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return wanted


def _machine() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}",
        "python": f"Python {platform.python_version()}",
        "load": f"load average {os.getloadavg()[0]:.1f} before the start",
    }


@contextmanager
def _showing_progress() -> Iterator[Progress]:
    """Show the current step in one line on stderr, if stderr is a terminal."""
    shown = Console(stderr=True)
    if not shown.is_terminal:
        yield lambda _text: None
        return
    with shown.status("") as status:
        yield status.update


if __name__ == "__main__":
    sys.exit(main())
