"""Workers that end sessions keep slots free for turns. The end of a session does not delay a shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from celery import Celery

from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.observe.current import ids
from perdure.sessions.ending import request_end
from perdure.tasks.process import ENDINGS, Process
from perdure.tasks.sessions import end
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from perdure.workers.celery_application import CONCURRENCY, load_tasks
from tests.turns.harness import Harness
from tests.turns.scripted import says


@pytest.fixture
def process(harness: Harness) -> Process:
    """A worker's process."""
    return Process(harness.runtime, Runner(harness.runtime, "tests"), {}, lambda _: None)


@pytest.fixture
def task(process: Process) -> Iterator[Any]:
    """A function that runs the task `sessions.end` in the worker's process."""
    with Celery("tests", broker="memory://", set_as_current=False) as app:
        app.perdure = lambda: process
        load_tasks(app)
        found = app.tasks[end.name]
        yield lambda session_id: found.apply(kwargs={"session_id": str(session_id)}, throw=True)


@pytest.fixture
def session_id(harness: Harness) -> UUID:
    """The id of a session whose end was requested. A sweep has already published a wake-up for the end."""
    session_id = UUID(harness.ask()["session_id"])
    request_end(harness.database, session_id, "enough")
    sweep(harness.runtime)
    harness.waker.endings.clear()
    return session_id


def test_an_ending_without_a_slot_is_woken_again(
    harness: Harness, process: Process, task: Any, session_id: UUID
) -> None:
    """If no slot is free, the task neither begins the ending nor counts an attempt. A sweep retries the ending."""
    assert ENDINGS * 2 < CONCURRENCY
    for _ in range(ENDINGS):
        assert process.endings.acquire(blocking=False)
    task(session_id)
    row = harness.session(session_id)
    assert (row.state, row.end_attempts) == ("active", 0)
    harness.move(harness.settings.turn.sweep_s * 2 + 0.1)
    sweep(harness.runtime)
    assert harness.waker.endings == [session_id]
    process.endings.release()
    harness.script(says("They met."))
    task(session_id)
    assert harness.session(session_id).state == "ended"
    assert process.endings.acquire(blocking=False), "the slot is released"


def test_a_summary_has_the_time_limit_of_a_model_call(harness: Harness, task: Any, session_id: UUID) -> None:
    """A drain of the fleet waits for a summary, so a summary has the time limit of a model call, not that of a turn."""
    assert harness.settings.model_timeout_s < harness.settings.turn.timeout_s
    given: list[float] = []

    def summarise(_: ModelRequest, call: ModelCall) -> ModelReply:
        given.append(call.remaining())
        return says("They met.")

    harness.script(summarise)
    task(session_id)
    assert 0 < given[0] <= harness.settings.model_timeout_s
    assert harness.session(session_id).state == "ended"


def test_a_summary_aborted_by_a_shutdown_wakes_another_worker(
    harness: Harness, process: Process, task: Any, session_id: UUID
) -> None:
    """A shutdown aborts the summary's model call. The task then publishes a wake-up, so that no sweep is needed."""

    def interrupted(_: ModelRequest, call: ModelCall) -> ModelReply:
        process.runner.keeper.begin_shutdown()
        call.check()
        raise AssertionError("the call was not aborted")

    harness.script(interrupted)
    task(session_id)
    row = harness.session(session_id)
    assert (row.state, row.end_attempts, row.lease_until) == ("summarizing", 0, None)
    assert harness.waker.endings == [session_id]


def test_an_aborted_summary_of_a_lost_session_wakes_no_worker(
    harness: Harness, process: Process, task: Any, session_id: UUID
) -> None:
    """If another process has claimed the session, the aborted task publishes no wake-up."""

    def overtaken(_: ModelRequest, call: ModelCall) -> ModelReply:
        harness.sql("UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s", id=session_id)
        process.runner.keeper.begin_shutdown()
        call.check()
        raise AssertionError("the call was not aborted")

    harness.script(overtaken)
    task(session_id)
    assert harness.session(session_id).lease_until is not None
    assert harness.waker.endings == []


def test_the_lines_about_an_ending_have_the_sessions_id(
    task: Any, session_id: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter of the log by `session_id` finds them."""
    seen = []
    monkeypatch.setattr("perdure.tasks.sessions.log.info", lambda *_: seen.append(ids()))
    task(session_id)
    assert seen == [{"session_id": str(session_id)}]
    assert ids() == {}
