"""The time that a closed circuit breaker adds to an empty call and to a turn.

The breaker stores its state in Redis, as it does when several workers share it. Turns with and without a breaker
alternate, so that other load on the machine affects both kinds. Both kinds use the same retry settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from benchmarks.agents import InProcessModel
from benchmarks.report import Section
from benchmarks.setup import Setup
from benchmarks.statements import bench
from perdure.clock import SystemClock
from perdure.models.resilient import GuardedModel
from perdure.resilience.registry import Breaker, Breakers, Unguarded
from perdure.settings import Settings

NAME = "breaker"

_CALLS = 3_000
_TURNS = 200
_CALLS_A_TURN = 2


@dataclass(frozen=True, slots=True)
class Cost:
    """Elapsed and CPU milliseconds of this process: one sample, or the medians of several."""

    ms: float
    cpu_ms: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.ms - other.ms, self.cpu_ms - other.cpu_ms)

    def row(self, name: str) -> list[str]:
        """The cost as a row of the table."""
        return [name, f"{self.ms:.2f}", f"{self.cpu_ms:.2f}"]


def measure(setup: Setup) -> Section:
    """Time calls and turns with and without a breaker; returns the section."""
    calls, turns = setup.scaled(_CALLS), setup.scaled(_TURNS)
    settings = Settings(_env_file=None)
    with setup.database("bench_breaker") as url, bench(url) as made:
        breakers = Breakers(settings.breaker, SystemClock(), setup.servers.redis.url)
        guarded, bare = breakers.get("llm:benchmark"), Unguarded()
        setup.progress("calls through a closed breaker")
        _, _, a_call = _compared(lambda: guarded.execute(_nothing, 120), lambda: bare.execute(_nothing, 120), calls)

        def turn(breaker: Breaker, user_id: str) -> None:
            made.model = GuardedModel(InProcessModel(), breaker, settings.retry, settings.model_timeout_s)
            made.turn(user_id)

        setup.progress("turns with a breaker and without")
        with_it, without, added = _compared(lambda: turn(guarded, "with"), lambda: turn(bare, "without"), turns)
        breakers.close()
    return Section(
        name=NAME,
        title="The cost of a closed breaker",
        method=(
            f"{calls} calls of an empty function, and {turns} turns of {_CALLS_A_TURN} model calls and one tool call, "
            "in one process. Calls and turns with and without a breaker alternate. Figures are medians of the elapsed "
            "time and of the process's CPU time; differences are medians of the pairs' differences. The circuit is in "
            "Redis on the same machine."
        ),
        columns=["milliseconds", "elapsed", "CPU"],
        rows=[
            a_call.row("added to a call"),
            with_it.row("a turn with a breaker"),
            without.row("a turn without"),
            added.row("added to a turn"),
        ],
        figures={
            "call_ms": a_call.ms,
            "call_cpu_ms": a_call.cpu_ms,
            "turn_with_ms": with_it.ms,
            "turn_without_ms": without.ms,
            "added_to_a_turn_ms": added.ms,
            "added_to_a_turn_cpu_ms": added.cpu_ms,
        },
    )


def _compared(one: Callable[[], None], other: Callable[[], None], times: int) -> tuple[Cost, Cost, Cost]:
    """Run `one` and `other` alternately, after a warm-up.

    Returns three medians: the cost of `one`, the cost of `other`, and `one` minus `other` in each pair of runs.
    """
    for _ in range(min(times, 20)):
        one()
        other()
    pairs = [(_sample(one), _sample(other)) for _ in range(times)]
    more = [first - second for first, second in pairs]
    return _median([first for first, _ in pairs]), _median([second for _, second in pairs]), _median(more)


def _sample(work: Callable[[], None]) -> Cost:
    cpu, began = time.process_time(), time.perf_counter()
    work()
    return Cost((time.perf_counter() - began) * 1_000, (time.process_time() - cpu) * 1_000)


def _median(costs: list[Cost]) -> Cost:
    return Cost(median(cost.ms for cost in costs), median(cost.cpu_ms for cost in costs))


def _nothing() -> None:
    return
