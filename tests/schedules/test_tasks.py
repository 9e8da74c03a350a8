"""Scheduled tasks with the real broker: messages whose header names a schedule entry, and direct calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import redis as redis_py
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

from perdure.clock import MovedClock
from perdure.errors import ProviderError
from perdure.runtime import Runtime
from perdure.servers.redis import client_url
from perdure.tasks.process import Process
from perdure.tasks.timetable import ScheduledTask, fire
from perdure.timetable.cadence import Every
from perdure.timetable.entry import HEADER, ScheduleEntry
from perdure.timetable.ledger import register
from perdure.timetable.reading import EntryStatus, read_schedules
from perdure.timetable.sweep import sweep_slots
from perdure.turns.run.loop import Runner

PATIENCE_S = 30
ENTRY = ScheduleEntry("hourly", Every(60), "tests.work", "maintenance", {"dry_run": False})


class Work:
    """The function of the task `tests.work`. Records the arguments of each run, and raises `error` if it is set."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.ran = threading.Event()

    def __call__(self, arguments: dict[str, Any]) -> str:
        self.runs.append(arguments)
        self.ran.set()
        if self.error is not None:
            raise self.error
        return "worked"


@pytest.fixture
def work() -> Work:
    """The function of the task `tests.work`."""
    return Work()


@pytest.fixture
def app(runtime: Runtime, clock: MovedClock, work: Work, redis_url: str) -> Celery:
    """A Celery application with the task `tests.work` and the test suite's Redis. The first slot of `ENTRY` is due."""
    made = Celery("tests", broker=redis_url, backend="cache+memory://", set_as_current=False)
    made.conf.update(worker_hijack_root_logger=False, task_default_queue="maintenance")

    def body(_: ScheduledTask, **arguments: Any) -> str:
        return work(arguments)

    made.task(body, name="tests.work", bind=True, base=ScheduledTask, shared=False, ignore_result=False)
    register(runtime.database, [ENTRY], 30)
    clock.advance(timedelta(hours=1))
    process = Process(runtime, Runner(runtime, "tests"), {}, lambda _: None, {ENTRY.name: ENTRY})
    made.perdure = lambda: process
    return made


class Publisher:
    """Publishes tasks; see `perdure.tasks.deliveries.Publisher`."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        """Send the task."""
        self._app.send_task(task, kwargs=arguments, **options)
        return True


@pytest.fixture
def worker(app: Celery) -> Iterator[Publisher]:
    """Run a worker on the real queue; yields a publisher to that queue."""

    def leave_logging_alone(**_: Any) -> None:
        """Do nothing. Because of this receiver, Celery does not change the log level of the test process."""

    setup_logging.connect(leave_logging_alone)
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=PATIENCE_S):
        yield Publisher(app)
    setup_logging.disconnect(leave_logging_alone)


def _status(runtime: Runtime) -> EntryStatus:
    return read_schedules(runtime.database, [ENTRY])[0]


def _call(app: Celery, name: str = ENTRY.name) -> Any:
    return app.tasks["tests.work"].apply(headers={HEADER: name}, throw=True).get()


@pytest.mark.long
def test_a_firing_crosses_the_broker(runtime: Runtime, work: Work, worker: Publisher) -> None:
    """A worker runs the newest slot of the entry that the message's header names."""
    settled = threading.Event()
    runtime.database.observe = lambda moment, name: (
        settled.set() if (moment, name) == ("after", "slots.settle") else None
    )

    assert fire(worker, ENTRY)

    assert settled.wait(PATIENCE_S)
    assert work.runs == [{"dry_run": False}]
    assert _status(runtime).last_done_slot == ENTRY.cadence.previous(runtime.clock.now())


@pytest.mark.long
def test_a_firing_lost_in_a_flush_is_repeated(
    app: Celery, runtime: Runtime, work: Work, request: pytest.FixtureRequest, redis_url: str
) -> None:
    """If the queue is lost before the task runs, the sweeper fires the slot again. The slot runs once."""
    settled = threading.Event()
    runtime.database.observe = lambda moment, name: (
        settled.set() if (moment, name) == ("after", "slots.settle") else None
    )
    wire = Publisher(app)
    assert fire(wire, ENTRY)
    with redis_py.Redis.from_url(client_url(redis_url)) as client:
        assert client.llen("maintenance") == 1
        client.flushall()

    request.getfixturevalue("worker")
    sweep_slots(runtime.database, runtime.settings.turn, [ENTRY], partial(fire, wire))

    assert settled.wait(PATIENCE_S)
    assert work.runs == [{"dry_run": False}]
    assert _status(runtime).last_done_slot == ENTRY.cadence.previous(runtime.clock.now())


@pytest.mark.long
def test_a_direct_call_claims_no_slot(runtime: Runtime, work: Work, worker: Publisher) -> None:
    """A direct call, without the header, runs the task at once and claims no slot."""
    worker.publish("tests.work", {}, queue="maintenance")

    assert work.ran.wait(PATIENCE_S)
    assert work.runs == [{}]
    assert _status(runtime).last_slot is None


def test_the_result_is_that_of_the_work(app: Celery, work: Work) -> None:
    """The first firing of a slot returns the work's result. A second firing does nothing and returns `None`."""
    assert [_call(app), _call(app)] == ["worked", None]
    assert len(work.runs) == 1


def test_a_failure_fails_the_task_and_frees_the_slot(app: Celery, runtime: Runtime, work: Work) -> None:
    """The task's result and the ledger have the error's code and message. The slot is no longer claimed."""
    work.error = ProviderError("the provider refused")

    app.tasks["tests.work"].apply(headers={HEADER: ENTRY.name}, task_id="the firing")

    result = app.AsyncResult("the firing")
    assert (result.state, str(result.result)) == ("FAILURE", "PROVIDER_ERROR: the provider refused")
    assert not result.traceback
    status = _status(runtime)
    assert (status.error, status.running, status.last_done_slot) == (
        "PROVIDER_ERROR: the provider refused",
        False,
        None,
    )


@pytest.mark.parametrize("task", ["tests.other", "tests.work"])
def test_an_entry_of_another_release_runs_nothing(
    app: Celery, work: Work, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    """If a message names an unknown entry, or an entry with another task, the task does no work and logs a warning."""
    app.perdure().entries["other"] = replace(ENTRY, name="other", task="tests.other")

    _call(app, "other" if task == "tests.other" else "unknown")

    assert work.runs == []
    assert "nothing was run" in caplog.text
