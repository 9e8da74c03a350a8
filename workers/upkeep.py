"""Work that may take minutes or wait for a third party: erasures, unused files, statistics, indexes, summaries.

Each duty of `UPKEEP` has a thread of its own, so that a duty that waits delays neither the sweep nor another duty. One
worker of all takes each round of a duty. Celery's tasks are no place for this work, because it would occupy a slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from perdure.casebank.search import build_indexes as build_case_indexes
from perdure.memory.embedding import build_indexes as build_memory_indexes
from perdure.resilience.duties import NOT_DUE, Duties
from perdure.runtime import Runtime
from perdure.sessions.running_summary import summarise_due
from perdure.turns.queries import TAKE_SWEEP
from perdure.users.statistics import forget_samples

_LONGEST_PAUSE_S = 3_600


@dataclass(frozen=True, slots=True)
class Upkeep:
    """A duty. `work` receives the runtime, and a function that returns whether the worker goes on.

    `every`: the duty runs every so many intervals of the sweeper.
    """

    every: int
    work: Callable[[Runtime, Callable[[], bool]], object]


UPKEEP = {
    "erasures": Upkeep(1, lambda runtime, _: runtime.eraser.finish_due()),
    "files": Upkeep(12, lambda runtime, _: runtime.files.collect()),
    "statistics": Upkeep(1, lambda runtime, go_on: forget_samples(runtime.database, go_on)),
    "memory indexes": Upkeep(
        6,
        lambda runtime, _: build_memory_indexes(
            runtime.database, runtime.embedder.name, runtime.settings.memory.index_rows
        ),
    ),
    "summaries": Upkeep(
        1,
        lambda runtime, go_on: summarise_due(
            runtime.database,
            runtime.clock,
            runtime.models(runtime.settings.summary_model or runtime.settings.model),
            runtime.settings.model_timeout_s,
            go_on,
        ),
    ),
    "case indexes": Upkeep(120, lambda runtime, _: build_case_indexes(runtime.database)),
}
"""The duties, by the names in the log."""


def start(runtime: Runtime, stopping: threading.Event) -> None:
    """Start a thread for each duty. The threads end after `stopping` is set, or with the process."""
    for name in UPKEEP:
        threading.Thread(
            target=_run, args=(name, runtime, stopping), name=f"perdure-{name.replace(' ', '-')}", daemon=True
        ).start()


def take_round(runtime: Runtime, name: str, go_on: Callable[[], bool] = lambda: True) -> object:
    """Run the duty `name` if its next round is due and no other worker has taken it; returns `NOT_DUE` otherwise."""
    upkeep = UPKEEP[name]
    if runtime.database.run(TAKE_SWEEP, {"name": name, "every_s": upkeep.every * runtime.settings.turn.sweep_s}):
        return upkeep.work(runtime, go_on)
    return NOT_DUE


def _run(name: str, runtime: Runtime, stopping: threading.Event) -> None:
    pause_s = UPKEEP[name].every * runtime.settings.turn.sweep_s
    duties = Duties(runtime.clock, pause_s, _LONGEST_PAUSE_S, observe=runtime.measures.duty)
    while not stopping.wait(pause_s):
        duties.run(name, partial(take_round, runtime, name, lambda: not stopping.is_set()))
