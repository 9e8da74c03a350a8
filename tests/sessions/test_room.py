"""Endings leave room for turns: a hundred sessions that fall idle at once must not take every thread of a worker."""

from __future__ import annotations

from celery import Celery

from perdure.sessions.ending import request_end
from perdure.turns.runner import Runner
from perdure.turns.sweep import sweep
from tasks.process import ENDINGS, Process
from tasks.sessions import end
from tests.turns.scripted import says
from tests.turns.stage import Stage
from workers.application import CONCURRENCY


def test_an_ending_without_room_is_due_in_the_next_sweep(stage: Stage) -> None:
    """It is neither begun nor lost, and no attempt is burnt."""
    assert ENDINGS * 2 < CONCURRENCY
    session_id = stage.ask()["session_id"]
    request_end(stage.database, session_id, "enough")
    sweep(stage.runtime)
    process = Process(stage.runtime, Runner(stage.runtime, "tests"), {}, lambda _: True)
    with Celery("tests", broker="memory://", set_as_current=False) as app:
        app.perdure = lambda: process
        task = app.tasks[end.name]
        for _ in range(ENDINGS):
            assert process.endings.acquire(blocking=False)
        task.apply(kwargs={"session_id": str(session_id)}, throw=True)
        row = stage.session(session_id)
        assert (row.state, row.end_attempts, row.woken_at) == ("active", 0, None)
        process.endings.release()
        stage.script(says("They met."))
        task.apply(kwargs={"session_id": str(session_id)}, throw=True)
    assert stage.session(session_id).state == "ended"
    assert process.endings.acquire(blocking=False), "the room is given back"
