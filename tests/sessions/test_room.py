"""Endings leave room: for turns, when a hundred sessions fall idle at once, and for a process that has to leave."""

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
    """A worker's."""
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
    """A session that is to end, and that a sweep has found."""
    session_id = UUID(harness.ask()["session_id"])
    request_end(harness.database, session_id, "enough")
    sweep(harness.runtime)
    harness.waker.endings.clear()
    return session_id


def test_an_ending_without_room_is_swept_again(harness: Harness, process: Process, task: Any, over: UUID) -> None:
    """It is neither begun nor lost, no attempt is counted, and sessions that were woken less often come first."""
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
    """A turn has time for many of them; an ending, which a drain of the fleet waits for, for one."""
    assert harness.settings.model_timeout_s < harness.settings.turn.timeout_s
    given: list[float] = []

    def summarise(_: ModelRequest, call: ModelCall) -> ModelReply:
        given.append(call.remaining())
        return says("They met.")

    harness.script(summarise)
    task(over)
    assert 0 < given[0] <= harness.settings.model_timeout_s
    assert harness.session(over).state == "ended"


def test_a_summary_that_a_shutdown_cuts_short_is_somebody_elses_at_once(
    harness: Harness, process: Process, task: Any, over: UUID
) -> None:
    """The call is aborted when the drain's time is up; another worker is woken without a sweep."""

    def interrupted(_: ModelRequest, call: ModelCall) -> ModelReply:
        process.runner.keeper.drain()
        call.check()
        raise AssertionError("the call was not ended")

    harness.script(interrupted)
    task(over)
    row = harness.session(over)
    assert (row.state, row.end_attempts, row.lease_until) == ("summarizing", 0, None)
    assert harness.waker.endings == [over]


def test_a_summary_that_is_no_longer_ours_wakes_nobody(
    harness: Harness, process: Process, task: Any, over: UUID
) -> None:
    """Another process has claimed the ending, which aborted the call."""

    def overtaken(_: ModelRequest, call: ModelCall) -> ModelReply:
        harness.sql("UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s", id=over)
        process.runner.keeper.drain()
        call.check()
        raise AssertionError("the call was not ended")

    harness.script(overtaken)
    task(over)
    assert harness.session(over).lease_until is not None
    assert harness.waker.endings == []
