"""Pruning a bank of 100,000 cases: the time and memory of making a plan, and the latency of searches during a run.

The benchmark generates cases for which the correct plan is known. There are groups of near duplicates, low performers,
inactive cases, and spared cases. The plan and the result of the run must equal the known plan, except that duplicate
pairs may be missing. Memory is the peak of this process above its level at the start.

This process times one search after another while a second process does a whole run at the default pace. The second
process is stopped for one second of every three. The searches during a stop are the baseline. Other load on the machine
and the state of the tables therefore affect the baseline as well.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from statistics import median, quantiles
from typing import Any, Self
from uuid import UUID

import numpy as np
import psutil
from numpy.typing import NDArray
from sqlalchemy import create_engine
from sqlalchemy.engine import URL

from benchmarks.report import Section
from benchmarks.setup import BenchmarkFailed, Setup, until
from perdure.casebank import search
from perdure.casebank.runs import prune, state
from perdure.casebank.runs.notify import NotifyFailed
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.settings import CasebankSettings

NAME = "casebank"

_DIMENSIONS = 384
_EMBEDDER = f"hash:{_DIMENSIONS}"
_CASES = 100_000
_SEED = 20251009
_QUESTIONS = 1_000
_DURING_S = 2.0
_QUIET_S = 1.0
_SLICE = 2_000
_LOOK_S = 0.05
_BEGIN_S = 60
_FEWEST_SEARCHES = 500
_COLUMNS = (
    "case_id, query, response_text, query_vector, embedder, usage_count, success_rate, last_accessed_at, created_at"
)


@dataclass(frozen=True)
class Truth:
    """The plan expected for the generated cases."""

    removed: set[str]
    merged: set[tuple[str, str]]
    archived: set[str]
    spared: set[str]


@dataclass(frozen=True, slots=True)
class Case:
    """One generated case, without its vector."""

    case_id: str
    kind: str
    usage: int
    rate: float
    idle_days: int


class Made:
    """A generated bank of `count` cases, in groups of ten.

    In each group, four cases have no duplicate, three are duplicates of each other, one has a low success rate, one is
    inactive, and one is spared although it has a low success rate or is inactive.
    """

    def __init__(self, count: int) -> None:
        self._rng = np.random.default_rng(_SEED)
        self._shuffled = self._rng.permutation(count)
        self.truth = Truth(set(), set(), set(), set())
        self.count = count

    def slices(self) -> Iterator[tuple[list[Case], NDArray[np.float32]]]:
        """The cases with their vectors, in slices; `truth` is complete after the last slice."""
        for start in range(0, self.count, _SLICE):
            cases: list[Case] = []
            vectors = []
            for ten in range(start, min(start + _SLICE, self.count), 10):
                cases += self._ten(ten)
                vectors.append(self._directions())
            yield cases, np.concatenate(vectors).astype(np.float32)

    def _ten(self, first: int) -> list[Case]:
        names = [f"case-{self._shuffled[first + number]:07}" for number in range(10)]
        used = int(self._rng.integers(20, 80))
        kinds = [
            *(("alone", used, 70.0, 30),) * 4,
            ("keeper", 90, 75.0, 30),
            ("duplicate", 80, 75.0, 30),
            ("duplicate", 70, 60.0, 40),
            ("low", 11 + used, 29.0, 30),
            ("sleeper", used, 70.0, 120),
            ("spared low", 11, 10.0, 3) if first % 20 else ("spared sleeper", 101, 70.0, 120),
        ]
        cases = [Case(name, *kind) for name, kind in zip(names, kinds, strict=True)]
        self._record_truth(cases)
        return cases

    def _record_truth(self, cases: Sequence[Case]) -> None:
        keeper = cases[4].case_id
        self.truth.removed.add(cases[7].case_id)
        self.truth.merged.update((keeper, each.case_id) for each in cases[5:7])
        self.truth.archived.add(cases[8].case_id)
        self.truth.spared.add(cases[9].case_id)

    def _directions(self) -> NDArray[np.float64]:
        """Ten unit vectors, one for each case of a group. The vectors are independent, except those of duplicates.

        The keeper is the case that absorbs its duplicates. The vector of a duplicate is the keeper's vector, rotated in
        a random direction by an angle whose cosine is between 0.951 and 1.
        """
        vectors = self._rng.normal(size=(10, _DIMENSIONS))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        keeper = vectors[4]
        for number in (5, 6):
            across = vectors[number] - (vectors[number] @ keeper) * keeper
            across /= np.linalg.norm(across)
            cosine = self._rng.uniform(0.951, 1.0)
            vectors[number] = cosine * keeper + np.sqrt(1 - cosine * cosine) * across
        return vectors


class Watched:
    """Context manager that measures this process's peak memory, in MiB above its level on entry."""

    def __enter__(self) -> Self:
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self._most = self._before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        """The peak in MiB above the level on entry."""
        return (self._most - self._before) / 2**20

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._most = max(self._most, self._process.memory_info().rss)


def measure(setup: Setup) -> Section:
    """Measure plans, a run, and searches during the run, in generated banks; returns the section."""
    count = setup.scaled(_CASES)
    small_s, small_mib = _planned(setup, count // 10)
    with setup.database("bench_casebank") as url:
        made = _filled(setup, url, count)
        database = Database(url)
        setup.progress(f"planning over {count:,} cases")
        with Watched() as watched:
            seconds, plan = _timed(database)
        recall = _checked(plan, made.truth)
        quiet, during, run_s = _searches(setup, database, made.truth)
        database.close()
    before_ms, during_ms = _p99(quiet), _p99(during)
    return Section(
        name=NAME,
        title=f"Pruning a bank of {count:,} cases of {_DIMENSIONS} dimensions",
        method=(
            "Generated cases: of ten, four without duplicates, a keeper with two duplicates (cosine 0.951 to 1), a low "
            "performer, an inactive case and a spared one; ids shuffled. The plan, made at full speed, is compared "
            "with the known plan pair by pair. Memory is above the process's level at the start, sampled every "
            f"{_LOOK_S * 1_000:.0f} ms. Searches find the 4 nearest by the index, one after the other, while another "
            "process does a whole run at its default pace. The baseline is measured while that process is stopped, "
            f"{_QUIET_S:g} s of every {_QUIET_S + _DURING_S:g} s."
        ),
        columns=["", f"{count // 10:,} cases", f"{count:,} cases"],
        rows=[
            ["seconds to plan", f"{small_s:.1f}", f"{seconds:.1f}"],
            ["MiB of memory", f"{small_mib:.0f}", f"{watched.mib:.0f}"],
            ["recall of duplicate pairs", "", f"{recall:.4f}"],
            ["seconds of the run at its default pace", "", f"{run_s:.0f}"],
            [f"search p99, run stopped, ms ({len(quiet):,} searches)", "", f"{before_ms:.1f}"],
            [f"search p99 during the run, ms ({len(during):,} searches)", "", f"{during_ms:.1f}"],
            ["ratio", "", f"{during_ms / before_ms:.2f}"],
        ],
        figures={
            "plan_s": seconds,
            "plan_tenth_s": small_s,
            "memory_mib": watched.mib,
            "memory_tenth_mib": small_mib,
            "recall": recall,
            "run_s": run_s,
            "search_median_before_ms": median(quiet),
            "search_median_during_ms": median(during),
            "search_p99_before_ms": before_ms,
            "search_p99_during_ms": during_ms,
            "search_p99_ratio": during_ms / before_ms,
        },
    )


def _planned(setup: Setup, count: int) -> tuple[float, float]:
    """The seconds and MiB that a plan over `count` cases takes. Compares the plan with the known plan."""
    with setup.database("bench_casebank") as url:
        made = _filled(setup, url, count)
        database = Database(url)
        _timed(database)  # warm the caches
        with Watched() as watched:
            seconds, plan = _timed(database)
        _checked(plan, made.truth)
        database.close()
    return seconds, watched.mib


def _timed(database: Database) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    plan = prune.dry_run(_bank(database, 100))
    return time.perf_counter() - began, plan


def _checked(plan: dict[str, Any], truth: Truth) -> float:
    """The share of the duplicate pairs that the plan found. All other parts of the plan must equal `truth`."""
    details = plan["details"]
    merged = {(each["keeper"], each["removed"]) for each in details["merged"]}
    assert set(details["removed"]) == truth.removed
    assert set(details["archived"]) == truth.archived
    assert {each["case_id"] for each in details["spared"]} == truth.spared
    assert merged <= truth.merged
    return len(merged) / len(truth.merged)


def _searches(setup: Setup, database: Database, truth: Truth) -> tuple[list[float], list[float], float]:
    """Search during a run; returns the times of the searches and of the run.

    The first list contains the milliseconds of each search while the run was stopped. The second list contains the
    milliseconds of each search while the run was active. The last value is the run's duration in seconds, without the
    stops.
    """
    setup.progress("building the index of the search (minutes, at full size)")
    search.build_indexes(database, index_from=1)
    questions = cycle(np.random.default_rng(_SEED + 1).normal(size=(_QUESTIONS, _DIMENSIONS)).tolist())
    _search_times(database, questions, _QUIET_S)  # warm the caches
    quiet, during, run_s = list[float](), list[float](), 0.0
    with _pruning(database.url) as run:
        while run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
            setup.progress(f"searching during a run, {run_s:.0f} s so far")
            during += _search_times(database, questions, _DURING_S)
            run_s += _DURING_S
            with suppress(psutil.NoSuchProcess):
                run.suspend()
                quiet += _search_times(database, questions, _QUIET_S)
                run.resume()
    [done] = state.list_runs(database)
    if done["phase"] != state.RunPhase.DONE:
        raise BenchmarkFailed(f"the run ended in phase {done['phase']}: {done['error']}")
    if min(len(quiet), len(during)) < _FEWEST_SEARCHES:
        raise BenchmarkFailed(f"too few searches: {len(during)} during the run, {len(quiet)} while it was stopped")
    _checked(state.result(database, UUID(done["run_id"])), truth)
    return quiet, during, run_s


@contextmanager
def _pruning(url: URL) -> Iterator[psutil.Process]:
    """Start a process that prunes at the default pace, and yield it after its first commit."""
    context = multiprocessing.get_context("spawn")
    began = context.Event()
    process = context.Process(target=_prune, args=(url.render_as_string(hide_password=False), began), daemon=True)
    process.start()
    try:
        until(began.is_set, _BEGIN_S)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


def _prune(url: str, began: Any) -> None:
    database = Database(url, observe=lambda *_: began.set())
    prune.run(_bank(database, CasebankSettings().load_percent))


def _search_times(database: Database, questions: Iterator[Sequence[float]], seconds: float) -> list[float]:
    """Search one question after the other for `seconds`; returns the milliseconds of each search."""
    times = []
    over = time.perf_counter() + seconds
    while (began := time.perf_counter()) < over:
        search.search(database, next(questions), _EMBEDDER, 4)
        times.append((time.perf_counter() - began) * 1_000)
    return times


def _p99(times: Sequence[float]) -> float:
    return quantiles(times, n=100)[-1]


def _filled(setup: Setup, url: URL, count: int) -> Made:
    """Generate a bank of `count` cases, and write it to the database with COPY."""
    setup.progress(f"making {count:,} cases")
    made = Made(count)
    engine = create_engine(url)
    with engine.connect() as connection:
        raw: Any = connection.connection.driver_connection
        with raw.cursor() as cursor:
            for cases, vectors in made.slices():
                cursor.copy_expert(f"COPY cases ({_COLUMNS}) FROM STDIN", StringIO(_copied(cases, vectors)))
        connection.commit()
        connection.exec_driver_sql("ANALYZE cases")
        connection.commit()
    engine.dispose()
    return made


def _copied(cases: Sequence[Case], vectors: NDArray[np.float32]) -> str:
    now = time.time()
    lines = []
    for case, vector in zip(cases, vectors, strict=True):
        idle = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - case.idle_days * 86_400))
        query = "how is a thing of this kind done" if case.kind in {"keeper", "duplicate"} else f"about {case.case_id}"
        written = f"[{','.join(f'{number:.7g}' for number in vector.tolist())}]"
        fields = (
            case.case_id,
            query,
            "like this",
            written,
            _EMBEDDER,
            case.usage,
            case.rate,
            idle,
            "2024-01-01T00:00:00Z",
        )
        lines.append("\t".join(map(str, fields)))
    return "\n".join(lines) + "\n"


def _bank(database: Database, load_percent: int) -> prune.RunContext:
    def refuse(_url: str, _body: bytes) -> None:
        raise NotifyFailed("a dry run sends no notice")

    return prune.RunContext(database, SystemClock(), CasebankSettings(load_percent=load_percent), refuse)
