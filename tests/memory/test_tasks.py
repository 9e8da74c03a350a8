"""The results and the schedule of the memory tasks, and the messages that start a consolidation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from celery import Celery

from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.offline import OfflineModel
from perdure.runtime import Runtime
from perdure.schedules.entries import active_entries
from perdure.settings import Settings
from perdure.tasks import memory, sessions
from perdure.tasks.process import Process
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from perdure.workers.celery_application import load_tasks
from tests.conftest import RecordingWaker
from tests.memory.archive import LYON, Archive
from tests.turns.harness import Harness

Call = Callable[..., Any]


@pytest.fixture
def process(runtime: Runtime) -> Process:
    """A worker process with the offline model and the built-in embedder."""
    parts = replace(runtime, embedder=HashEmbedder(384), models=lambda _: OfflineModel())
    return Process(parts, Runner(parts, "tests"), {}, lambda _: None)


@pytest.fixture
def call(process: Process) -> Call:
    """A function that calls a task directly and returns its result."""
    app = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.perdure = lambda: process

    def made(name: str, **arguments: Any) -> Any:
        return app.tasks[name].apply(kwargs=arguments, throw=True).get()

    load_tasks(app)
    assert {memory.consolidate.name, sessions.end.name} <= set(app.tasks)
    return made


def test_a_batch_returns_its_counts(archive: Archive, call: Call) -> None:
    """`memory.consolidate` returns the number of sessions and memories for each outcome."""
    archive.ended(LYON)
    archive.ended("Hi.", turns=1)
    assert call("memory.consolidate") == {
        "processed": 2,
        "skipped": 1,
        "failed": 0,
        "stored": 1,
        "duplicates_merged": 0,
        "superseded": 0,
    }


def test_one_session_is_consolidated_by_its_id(archive: Archive, call: Call, process: Process) -> None:
    """`consolidate_session` consolidates a session once. It does nothing while all consolidation slots are in use."""
    session_id = archive.ended(LYON)
    for _ in range(8):
        process.consolidations.acquire()
    call("memory.consolidate_session", session_id=str(session_id))
    assert archive.known() == []
    process.consolidations.release()
    for _ in range(2):
        call("memory.consolidate_session", session_id=str(session_id))
    assert [row.content for row in archive.known()] == [LYON]


def test_decay_and_hot_memories_are_tasks(archive: Archive, call: Call) -> None:
    """`memory.decay` returns the number of changed memories, and `memory.refresh_hot` the number of hot memories."""
    archive.ended(LYON)
    call("memory.consolidate")
    archive.harness.move(86_400)
    assert call("memory.decay") == 1
    assert call("memory.refresh_hot") == 0


def test_the_end_of_a_session_wakes_its_consolidation(harness: Harness, call: Call, waker: RecordingWaker) -> None:
    """The end of a session publishes a task that consolidates the session. The sweeper replaces a lost task."""
    session_id = harness.send().session_id
    harness.run(session_id)
    call("sessions.end", session_id=str(session_id), reason="enough")
    assert waker.consolidations == [session_id]
    assert harness.session(session_id).ended_at is not None
    harness.move(harness.settings.turn.lease_s + 10)
    assert _swept(harness) == [session_id, session_id]


def test_a_refused_wake_up_is_issued_again(archive: Archive, waker: RecordingWaker) -> None:
    """If the broker refuses the task for a session's consolidation, the next sweep publishes the task again."""
    session_id = archive.ended(LYON)
    waker.away = True
    assert _swept(archive.harness) == []
    waker.away = False
    archive.harness.move(archive.harness.settings.turn.sweep_s + 0.1)
    assert _swept(archive.harness) == [session_id]
    archive.harness.move(archive.harness.settings.turn.sweep_s + 0.1)
    assert _swept(archive.harness) == [session_id]


def test_the_interval_is_a_setting(settings: Settings) -> None:
    """With an interval of 8 hours, the memory tasks run at midnight, 8:00 and 16:00."""
    changed = settings.model_copy(
        update={"consolidation": settings.consolidation.model_copy(update={"interval_hours": 8})}
    )
    listed = active_entries({"memory.consolidate", "memory.decay", "memory.refresh_hot"}, changed)
    assert {entry.cadence.describe() for entry in listed.values()} == {"daily at 00:00, 08:00 and 16:00 UTC"}
    assert {entry.queue for entry in listed.values()} == {"memory"}


def _swept(harness: Harness) -> list[UUID | None]:
    assert sweep(harness.runtime) is not None
    return harness.waker.consolidations
