"""The upkeep of a worker: each duty has a thread of its own, and one worker of all takes each round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from perdure.resilience.duties import NOT_DUE
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.workers import upkeep
from perdure.workers.upkeep import UPKEEP, Upkeep

PATIENCE_S = 20.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with a short interval of the sweeper."""
    return settings.model_copy(update={"turn": settings.turn.model_copy(update={"sweep_s": 0.05})})


@pytest.mark.parametrize("harm", ["raises", "waits"])
@pytest.mark.parametrize("harmed", UPKEEP)
def test_a_duty_that_fails_or_waits_keeps_no_other_from_its_turn(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, harmed: str, harm: str
) -> None:
    """If one duty fails or waits for hours, each other duty still runs in each of its rounds."""
    stopping, ended = threading.Event(), threading.Event()
    ran = {name: threading.Semaphore(0) for name in UPKEEP}

    def harm_or_work(name: str, work: Callable[[Runtime, Callable[[], bool]], object], *given: Any) -> None:
        if name == harmed:
            assert harm == "waits", "this failure is planted"
            ended.wait(PATIENCE_S)
        else:
            work(*given)
            ran[name].release()

    for name, duty in list(UPKEEP.items()):
        monkeypatch.setitem(UPKEEP, name, Upkeep(1, partial(harm_or_work, name, duty.work)))
    before = set(threading.enumerate())
    upkeep.start(runtime, stopping)
    started = set(threading.enumerate()) - before
    try:
        for name in UPKEEP.keys() - {harmed}:
            for _ in range(2):
                assert ran[name].acquire(timeout=PATIENCE_S), f"{name} never has its turn"
    finally:
        stopping.set()
        ended.set()
        for thread in started:
            thread.join(PATIENCE_S)


def test_one_worker_takes_a_round(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several workers, one runs a duty in each interval."""
    ran = list[str]()
    for name in UPKEEP:
        monkeypatch.setitem(UPKEEP, name, Upkeep(1_000, partial(lambda name, *_: ran.append(name), name)))
        found = [upkeep.take_round(replace(runtime), name) for _ in range(3)]
        assert found == [None, NOT_DUE, NOT_DUE]
    assert ran == list(UPKEEP)
