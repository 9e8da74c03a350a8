"""A worker is killed before, within and after each unit of a turn: perdure and other systems, one column each.

Every kill is a schedule of its own. A system that is not installed has an empty column.
"""

from __future__ import annotations

import importlib.util

from benchmarks.crashes.counting import Counts, count
from benchmarks.crashes.harness import BOUND_S, Run, run
from benchmarks.crashes.recorder import POINTS
from benchmarks.crashes.script import Phase
from benchmarks.crashes.systems import SYSTEMS
from benchmarks.report import Section
from benchmarks.setup import Setup

NAME = "crashes"

_ROWS = (
    "",
    "schedules",
    "turns lost",
    "turns stuck",
    "model calls repeated",
    "tool entered again",
    "tool's effects repeated",
    "… with a new key",
    "replies without the effect",
    "calls in doubt",
    "replies repeated",
    "take-over s, median",
    "take-over s, longest",
    "WAL KiB per turn",
    "taken over after",
)


def measure(setup: Setup) -> Section:
    """Play all schedules of all systems that are installed; those within a unit only, if `setup.quick`."""
    points = [point for point in POINTS if point.phase is Phase.INSIDE or not setup.quick]
    columns: list[list[str]] = [list(_ROWS)]
    notes: list[str] = []
    figures: dict[str, float] = {}
    for package, systems in SYSTEMS.items():
        for system in systems:
            if importlib.util.find_spec(package) is None:
                columns.append([system.name, "not installed", *[""] * (len(_ROWS) - 2)])
                continue
            played = run(system, points, setup.progress)
            found = _figures(count(played.played), played)
            columns.append([system.name, *map(_cell, found.values()), system.limit])
            notes.append(f"{system.name}: {system.versions()}; {system.document}.")
            figures.update({f"{system.name}: {name}": value for name, value in found.items()})
    heads, *rows = zip(*columns, strict=True)
    return Section(
        name=NAME,
        title="A worker is killed before, within and after each unit of a turn",
        method=(
            "A turn has 2 model calls, 1 tool call and a reply to a URL. Each schedule is a turn in which the worker "
            "is killed (SIGKILL) at one point. A supervisor starts it again at once. Lost: no reply within "
            f"{BOUND_S:g} s. Stuck: not ended by then. In doubt: the model reads that a call's outcome is unknown. "
            "Take-over: from the kill until the next unit begins. WAL: median of turns without a kill.\n"
            + "\n".join(notes)
        ),
        columns=heads,
        rows=rows,
        figures=figures,
    )


def _figures(counts: Counts, played: Run) -> dict[str, float]:
    """A system's figures, in the order of `_ROWS`."""
    return {
        "schedules": counts.schedules,
        "lost": counts.lost,
        "stuck": counts.stuck,
        "model_calls_repeated": counts.model_calls,
        "tool_entered_again": counts.executions,
        "effects_repeated": counts.effects,
        "with_a_new_key": counts.new_keys,
        "effects_missing": counts.missing,
        "in_doubt": counts.in_doubt,
        "replies_repeated": counts.replies,
        "take_over_median_s": counts.median_s,
        "take_over_longest_s": counts.max_s,
        "wal_kib_per_turn": played.wal_bytes / 1024,
    }


def _cell(value: float) -> str:
    return f"{value}" if isinstance(value, int) else f"{value:.1f}"
