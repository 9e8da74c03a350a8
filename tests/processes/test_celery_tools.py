"""Tools that are tasks of another Celery application: every outcome of a task, and a SIGKILL at each commit."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from uuid import UUID, uuid4

import httpx2
import pytest
from redis import Redis

from perdure.access.tenants import UserKey
from perdure.assembly import Addresses
from perdure.servers.redis import client_url
from perdure.settings import Settings
from perdure.tools.awaited.port import TaskCall, TaskSent
from perdure.turns.calls.result_values import LOST
from perdure.turns.cancel import cancel
from perdure.turns.reading import read_turn
from perdure.workers.publish.calls import CeleryCalls
from tests.cli.conftest import Perdure
from tests.processes import rabbit
from tests.processes.faults import SCENE, Place, done, wait_until
from tests.processes.gateway import serving
from tests.processes.installation import Installation
from tests.processes.model_server import PARTS, ModelServer, answer_to
from tests.processes.nodes import RedisContainer, Worker, WorkerContainer
from tests.processes.reports import BACKEND, STEPS, URL
from tests.processes.streams import events

PATIENCE_S = 60.0
SWEEP_S = 40.0
LATE_S = 3.0
"""Seconds until a paused broker answers: longer than one wait for it, and shorter than two."""

pytestmark = pytest.mark.timeout(240)

BOUNDARIES = [
    Place("after", "turns.step"),  # the intent is committed, the task is not sent
    Place("before", "turns.note_sent"),  # the task is sent, but the commit that records it is missing
    Place("after", "turns.note_sent"),
    Place("before", "turns.wait_calls"),
    Place("after", "turns.wait_calls"),
    Place("before", "turns.finish_task"),  # the result has arrived
    Place("after", "turns.finish_task"),
    Place("after", "turns.claim_due", 2),  # the turn resumes
    Place("before", "turns.step", 2),
    Place("after", "turns.step", 2),
]
ALWAYS = ("charge", "before-turns.note_sent-1")
"""The kind of task and the place of the only kill that `make test` runs."""


@pytest.fixture
def application(installation: Installation) -> Worker:
    """The worker of the application `tests.processes.reports`."""
    return application_of(installation)


def application_of(installation: Installation, *options: str) -> Worker:
    """Start a worker of the application `tests.processes.reports`."""
    environment = {
        **{name: value for name, value in installation.environment.items() if "PERDURE" not in name},
        URL: installation.environment["PERDURE_BROKER_URL"],
        BACKEND: installation.redis.url,
        SCENE: str(installation.directory),
    }
    container = WorkerContainer("reports", environment, installation.directory, options, "tests.processes.reports")
    made = Worker(container, app=None)
    installation.workers.append(made)
    container.start()
    container.ready()
    return made


def _answer(installation: Installation, text: str) -> str:
    turn_id = installation.accept(text).turn_id
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert turn["status"] == "done"
    reply: str = turn["reply"]["text"]
    return reply


@pytest.mark.exhaustive
def test_every_outcome_of_a_task_reaches_the_model(installation: Installation, application: Worker) -> None:
    """The model gets a result if a task succeeds, fails, returns no JSON, stores no result, is unknown or is slow.

    A slow task's progress is shown long before the sweeper's next round.
    """
    installation.environment["PERDURE_TURN__SWEEP_S"] = str(SWEEP_S)
    installation.worker().ready()
    text = "report: a"
    assert _answer(installation, text) == answer_to(text, done("report", text))
    text = "fails: b"
    assert _answer(installation, text) == answer_to(text, f"Error: RuntimeError: no paper for {text}")
    text = "odd: c"
    assert "Error: " in _answer(installation, text)
    text = "silent: d"
    assert _answer(installation, text) == answer_to(text, done("silent report", text))
    text = "nobodys: e"
    assert "NotRegistered" in _answer(installation, text)

    text = "slowly: f"
    turn_id = installation.accept(text).turn_id

    def progress() -> str | None:
        waiting = read_turn(installation.database, turn_id)["waiting_for"]
        return None if waiting is None else waiting["progress"]

    assert wait_until(progress, "the task's progress is shown", SWEEP_S / 2) == '{"done": 1, "of": 2}'
    installation.faults.release()
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert turn["reply"]["text"] == answer_to(text, done("slow report", text))
    installation.check()


@pytest.mark.exhaustive
def test_the_progress_of_a_task_is_streamed_within_a_second(
    installation: Installation, application: Worker, perdure: Perdure
) -> None:
    """Whenever it is reported, between two rounds of the sweeper, which are far apart."""
    installation.environment["PERDURE_TURN__SWEEP_S"] = str(SWEEP_S)
    installation.worker().ready()
    seen = list[float]()

    def allow_next() -> None:
        time.sleep(0.13 * len(seen))  # the reports come at different times between two probes
        (installation.directory / f"step-{len(seen)}").touch()

    with serving(perdure) as url:
        turn_id = installation.accept(text := "stepping: a").turn_id
        with httpx2.stream("GET", f"{url}/v1/turns/{turn_id}/events", timeout=PATIENCE_S) as response:
            allow_next()
            for _, kind, data in events(response.iter_lines()):
                if kind == "progress" and (report := json.loads(data["text"]))["step"] == len(seen):
                    seen.append(time.monotonic() - report["at"])
                    allow_next()
                if len(seen) == STEPS:
                    installation.faults.release()
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert turn["reply"]["text"] == answer_to(text, done("stepping", text))
    assert len(seen) == STEPS
    assert max(seen) < 1, seen


@pytest.mark.long
def test_a_list_of_arguments_is_one_task_each(installation: Installation, application: Worker) -> None:
    """A call with a list sends one task per element. Each task runs once, and the model gets the results in order."""
    installation.worker().ready()
    text = "reports: a"
    notes = [f"{text} {number}" for number in range(PARTS)]
    results = json.dumps([{"result": done("report", note)} for note in notes])
    assert _answer(installation, text) == answer_to(text, results)
    assert sorted(each.note for each in installation.faults.effects()) == notes
    installation.check()


@pytest.mark.long
def test_a_wait_survives_a_dead_worker_and_a_lost_callback(installation: Installation, application: Worker) -> None:
    """If the task's callback is lost while no worker runs, the next worker reads the task's result from the backend."""
    worker = installation.worker()
    worker.ready()
    text = "slowly: outlives"
    installation.faults.arm(Place("after", "turns.wait_calls"), signal.SIGKILL)
    turn_id = installation.accept(text).turn_id
    wait_until(installation.faults.fired, "the turn waits", PATIENCE_S)
    worker.container.wait()
    installation.faults.release()
    redis = Redis.from_url(client_url(installation.redis.url))
    wait_until(lambda: redis.exists("ingress"), "the task has ended", PATIENCE_S)
    redis.delete("ingress")
    application.kill("SIGTERM")
    assert read_turn(installation.database, turn_id)["status"] == "parked"
    worker.container.start()
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["reply"]["text"], turn["attempts"]) == (answer_to(text, done("slow report", text)), 1)
    installation.check()


@pytest.mark.long
@pytest.mark.parametrize("end", ["cancel", "erase"])
def test_the_queued_task_of_a_turn_that_ends_is_not_begun(installation: Installation, end: str) -> None:
    """If a turn is cancelled or the turn's user is erased, the turn's queued task is revoked and never runs."""
    application_of(installation, "--concurrency", "1")
    installation.worker().ready()
    busy = installation.accept("slowly: busy", user="bea").turn_id
    wait_until(lambda: installation.faults.effects("slowly: busy"), "the application is busy", PATIENCE_S)
    unwanted = installation.accept("report: unwanted", user="cid").turn_id
    wait_until(lambda: _status(installation, unwanted) == "parked", "the turn waits for its task", PATIENCE_S)
    if end == "cancel":
        cancel(installation.runtime, unwanted)
        assert _status(installation, unwanted) == "cancelled"
        revoked = "SELECT FROM tool_effects WHERE turn_id = %(id)s AND status = 'unknown' AND probe_at IS NULL"
    else:
        installation.runtime.eraser.erase(UserKey("cid"))
        revoked = "SELECT FROM erasures WHERE revoked_at IS NOT NULL AND %(id)s IS NOT NULL"
    wait_until(lambda: installation.query(revoked, id=unwanted), "a sweep revokes its task", PATIENCE_S)
    wanted = installation.accept("report: wanted", user="dee").turn_id
    wait_until(lambda: _status(installation, wanted) == "parked", "the turn waits for its task", PATIENCE_S)
    installation.faults.release()
    installation.settled(busy, wanted, within_s=PATIENCE_S)
    assert len(installation.faults.effects("report: wanted")) == 1
    assert installation.faults.effects("report: unwanted") == []


@pytest.mark.exhaustive
def test_over_rabbitmq(
    database_url: str, redis_server: RedisContainer, model_server: ModelServer, tmp_path: Path
) -> None:
    """With RabbitMQ as the broker and Redis as the result backend, the task's callback reaches the queue `ingress`."""
    with rabbit.running(tmp_path) as broker_url:
        installation = Installation(database_url, redis_server, model_server, tmp_path, broker_url)
        try:
            application_of(installation)
            installation.worker().ready()
            for text in ("report: a", "charge: b"):
                assert _answer(installation, text) == answer_to(text, done(text.partition(":")[0], text))
            text = "fails: c"
            assert _answer(installation, text) == answer_to(text, f"Error: RuntimeError: no paper for {text}")
            installation.check()
        finally:
            installation.close()


@pytest.mark.long
def test_a_broker_that_answers_too_late_gets_a_task_once(redis_server: RedisContainer) -> None:
    """It has read the task by then. A second attempt would repeat the effect of an unsafe task."""
    calls = CeleryCalls.at(Settings(_env_file=None), Addresses("postgresql://", redis_server.url, redis_server.url))
    first, second = (_task() for _ in range(2))
    assert calls.send(first) is TaskSent.YES
    redis_server.kill("SIGSTOP")
    resumed = threading.Timer(LATE_S, redis_server.kill, ["SIGCONT"])
    resumed.start()
    assert calls.send(second) is TaskSent.MAYBE
    resumed.join()
    with Redis.from_url(client_url(redis_server.url)) as client:
        wait_until(lambda: client.llen("celery") >= 2, "Redis has read the tasks")
        assert Counter(json.loads(each)["headers"]["id"] for each in client.lrange("celery", 0, -1)) == {
            str(first.task_id): 1,
            str(second.task_id): 1,
        }
    calls.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_task_is_sent_after_a_restart_of_the_broker(redis_server: RedisContainer, tmp_path: Path, kind: str) -> None:
    """A connection that the broker has closed is replaced before the task is sent: it is known whether it was."""
    broker: RedisContainer | rabbit.Rabbit = redis_server
    if kind == "rabbitmq":
        broker = rabbit.Rabbit(tmp_path)
        broker.start()
    calls = CeleryCalls.at(Settings(_env_file=None), Addresses("postgresql://", redis_server.url, broker.url))
    try:
        assert calls.send(_task()) is TaskSent.YES
        broker.kill()
        broker.start()
        assert calls.send(_task()) is TaskSent.YES
    finally:
        calls.close()
        if isinstance(broker, rabbit.Rabbit):
            broker.close()


def _task() -> TaskCall:
    task_id = uuid4()
    return TaskCall(task_id, "reports.charge", {"note": "a"}, None, 60, task_id)


def _status(installation: Installation, turn_id: UUID) -> str:
    status: str = read_turn(installation.database, turn_id)["status"]
    return status


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, marks=[] if (kind, str(place)) == ALWAYS else pytest.mark.exhaustive)
        for kind in ("report", "charge")
        for place in BOUNDARIES
    ],
    ids=str,
)
def test_after_a_kill_the_task_is_done_once(
    installation: Installation, application: Worker, kind: str, place: Place
) -> None:
    """Wherever a worker dies, the model gets one result. An unsafe task that may have been sent is not sent again."""
    with installation.killed_once(place):
        turn_id = installation.accept(text := f"{kind}: {place}").turn_id
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)

    assert (turn["status"], turn["waiting_for"]) == ("done", None)
    effects = installation.faults.effects(text)
    if kind == "charge" and str(place) == "after-turns.step-1":
        assert (effects, turn["reply"]["text"]) == ([], answer_to(text, LOST))
    else:
        [effect] = effects
        assert turn["reply"]["text"] == answer_to(text, done(kind, text))
        [row] = installation.query("SELECT effect_id FROM tool_effects WHERE turn_id = %(id)s", id=turn_id)
        assert effect.effect_id == str(row.effect_id)
    installation.check()
