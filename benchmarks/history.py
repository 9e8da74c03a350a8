"""The cost of a turn early and late in a long conversation, in milliseconds and bytes of WAL.

Turns of a young and an old conversation alternate, so that other load on the machine affects both. Before the counted
turns, the benchmark forces a checkpoint and runs a few uncounted turns. The first change of a page after a checkpoint
writes the whole page to the WAL, and that cost would distort the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from sqlalchemy import Connection, text

from benchmarks import langgraph_peer
from benchmarks.report import Section
from benchmarks.setup import Setup, connected
from benchmarks.statements import bench

NAME = "history"

_EARLY = 30
_LATE = 400
_SETTLING = 5
_SAMPLED = 21
_WAL = text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")

Turn = Callable[[str], None]
"""Runs one turn of the named conversation."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one turn, or the median of several."""

    ms: float
    wal_bytes: float


@dataclass(frozen=True, slots=True)
class Growth:
    """The cost of a turn early and late in a conversation."""

    early: Cost
    late: Cost

    @property
    def ms(self) -> float:
        """The late turn's milliseconds as a multiple of the early turn's."""
        return self.late.ms / self.early.ms

    @property
    def wal(self) -> float:
        """The late turn's WAL bytes as a multiple of the early turn's."""
        return self.late.wal_bytes / self.early.wal_bytes


def measure(setup: Setup) -> Section:
    """Measure perdure and LangGraph; returns the section."""
    late = _LATE // 4 if setup.quick else _LATE
    mine, theirs = _perdure(setup, late), _langgraph(setup, late)
    return Section(
        name=NAME,
        title=f"A turn after {_EARLY} and after {late} turns of one conversation",
        method=(
            f"Two conversations in one process, one around its {_EARLY}th turn and one around its {late}th, with "
            f"alternating turns. Figures are medians of {_SAMPLED} turns, from accepting to settling. WAL is the "
            "difference of pg_current_wal_insert_lsn around a turn. A checkpoint is forced before, and the next "
            f"{_SETTLING} turns of each conversation do not count, so that full-page images are excluded."
        ),
        columns=["", f"ms at {_EARLY}", f"ms at {late}", "ratio", f"WAL bytes at {_EARLY}", f"at {late}", "ratio"],
        rows=[_row("perdure", mine), _row("LangGraph", theirs)],
        figures={**_figures("perdure", mine), **_figures("langgraph", theirs)},
    )


def _perdure(setup: Setup, late: int) -> Growth:
    setup.progress(f"perdure: a conversation of {late} turns")
    with setup.database("bench_history") as url, connected(url) as admin, bench(url) as made:
        return _compared(admin, made.turn, late)


def _langgraph(setup: Setup, late: int) -> Growth:
    setup.progress(f"LangGraph: a conversation of {late} turns")
    with (
        setup.database("bench_history", tables=False) as url,
        connected(url) as admin,
        langgraph_peer.agent(url) as compiled,
    ):
        return _compared(admin, lambda name: langgraph_peer.turn(compiled, name), late)


def _compared(admin: Connection, turn: Turn, late: int) -> Growth:
    """Extend an old and a young conversation, then sample turns of the two alternately.

    `late` is the turn number around which the old conversation is sampled.
    """
    for name, length in (("old", late), ("young", _EARLY)):
        for _ in range(length - _SETTLING - _SAMPLED // 2):
            turn(name)
    admin.execute(text("CHECKPOINT"))
    for _ in range(_SETTLING):
        turn("old")
        turn("young")
    pairs = [(_sample(admin, turn, "young"), _sample(admin, turn, "old")) for _ in range(_SAMPLED)]
    young, old = zip(*pairs, strict=True)
    return Growth(_median(young), _median(old))


def _sample(admin: Connection, turn: Turn, name: str) -> Cost:
    wal, began = admin.execute(_WAL).scalar_one(), time.perf_counter()
    turn(name)
    milliseconds = (time.perf_counter() - began) * 1000
    return Cost(milliseconds, admin.execute(_WAL).scalar_one() - wal)


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(median(cost.ms for cost in costs), median(cost.wal_bytes for cost in costs))


def _row(who: str, growth: Growth) -> list[str]:
    early, late = growth.early, growth.late
    return [
        who,
        f"{early.ms:.1f}",
        f"{late.ms:.1f}",
        f"{growth.ms:.2f}",
        f"{early.wal_bytes:,.0f}",
        f"{late.wal_bytes:,.0f}",
        f"{growth.wal:.2f}",
    ]


def _figures(who: str, growth: Growth) -> dict[str, float]:
    return {
        f"{who}_early_ms": growth.early.ms,
        f"{who}_late_ms": growth.late.ms,
        f"{who}_ms_ratio": growth.ms,
        f"{who}_early_wal_bytes": growth.early.wal_bytes,
        f"{who}_late_wal_bytes": growth.late.wal_bytes,
        f"{who}_wal_ratio": growth.wal,
    }
