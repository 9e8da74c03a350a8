"""Endings are limited: they leave slots for turns and delay no shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from celery import Celery

from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.sessions.ending import request_end
from perdure.tasks.process import ENDINGS, Process
from perdure.tasks.sessions import end
from perdure.turns.run.runner import Runner
from perdure.turns.sweep import sweep
from perdure.workers.application import CONCURRENCY, load_tasks
from tests.turns.harness import Harness
from tests.turns.scripted import says


@pytest.fixture
def process(harness: Harness) -> Process:
    """A worker's process."""
    return Process(harness.runtime, Runner(harness.runtime, "tests"), {}, lambda _: True)


@pytest.fixture
def task(process: Process) -> Iterator[Any]:
    """Runs `sessions.end` in that process."""
    with Celery("tests", broker="memory://", set_as_current=False) as app:
        app.perdure = lambda: process
        load_tasks(app)
        found = app.tasks[end.name]
        yield lambda session_id: found.apply(kwargs={"session_id": str(session_id)}, throw=True)


@pytest.fixture
def over(harness: Harness) -> UUID:
    """A session whose end was requested, and that a sweep has woken."""
    session_id = UUID(harness.ask()["session_id"])
    request_end(harness.database, session_id, "enough")
    sweep(harness.runtime)
    harness.waker.endings.clear()
    return session_id


def test_an_ending_without_room_is_swept_again(harness: Harness, process: Process, task: Any, over: UUID) -> None:
    """An ending without a free slot is neither begun nor lost, and costs no attempt."""
    assert ENDINGS * 2 < CONCURRENCY
    for _ in range(ENDINGS):
        assert process.endings.acquire(blocking=False)
    task(over)
    row = harness.session(over)
    assert (row.state, row.end_attempts) == ("active", 0)
    harness.move(harness.settings.turn.sweep_s * 2 + 0.1)
    sweep(harness.runtime)
    assert harness.waker.endings == [over]
    process.endings.release()
    harness.script(says("They met."))
    task(over)
    assert harness.session(over).state == "ended"
    assert process.endings.acquire(blocking=False), "the room is given back"


def test_a_summary_takes_no_longer_than_a_call_of_the_model_may(harness: Harness, task: Any, over: UUID) -> None:
    """A drain of the fleet waits for endings, so a summary has the time limit of one model call, not of a turn."""
    assert harness.settings.model_timeout_s < harness.settings.turn.timeout_s
    given: list[float] = []

    def summarise(_: ModelRequest, call: ModelCall) -> ModelReply:
        given.append(call.remaining())
        return says("They met.")

    harness.script(summarise)
    task(over)
    assert 0 < given[0] <= harness.settings.model_timeout_s
    assert harness.session(over).state == "ended"


def test_a_summary_aborted_by_a_shutdown_is_handed_on_at_once(
    harness: Harness, process: Process, task: Any, over: UUID
) -> None:
    """The drain aborts the call, and another worker is woken without a sweep."""

    def interrupted(_: ModelRequest, call: ModelCall) -> ModelReply:
        process.runner.keeper.drain()
        call.check()
        raise AssertionError("the call was not ended")

    harness.script(interrupted)
    task(over)
    row = harness.session(over)
    assert (row.state, row.end_attempts, row.lease_until) == ("summarizing", 0, None)
    assert harness.waker.endings == [over]


def test_an_aborted_summary_of_a_lost_session_wakes_no_worker(
    harness: Harness, process: Process, task: Any, over: UUID
) -> None:
    """Another process has claimed the ending, so no further worker is needed."""

    def overtaken(_: ModelRequest, call: ModelCall) -> ModelReply:
        harness.sql("UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s", id=over)
        process.runner.keeper.drain()
        call.check()
        raise AssertionError("the call was not ended")

    harness.script(overtaken)
    task(over)
    assert harness.session(over).lease_until is not None
    assert harness.waker.endings == []
