"""Tools that are tasks of another Celery application: every outcome of a task, and a SIGKILL at each commit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from uuid import UUID

import pytest
from redis import Redis

from perdure.access.tenants import UserKey
from perdure.servers.redis import client_url
from perdure.turns.calls.result_values import LOST
from perdure.turns.cancel import cancel
from perdure.turns.reading import read_turn
from tests.processes import rabbit
from tests.processes.faults import SCENE, Place, done, wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import PARTS, ModelServer, answer_to
from tests.processes.nodes import RedisContainer, Worker, WorkerContainer
from tests.processes.reports import BACKEND, URL

PATIENCE_S = 60.0
SWEEP_S = 40.0

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
    return _application(installation)


def _application(installation: Installation, *options: str) -> Worker:
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


@pytest.mark.long
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
    _application(installation, "--concurrency", "1")
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


@pytest.mark.long
def test_over_rabbitmq(
    database_url: str, redis_server: RedisContainer, model_server: ModelServer, tmp_path: Path
) -> None:
    """With RabbitMQ as the broker and Redis as the result backend, the task's callback reaches the queue `ingress`."""
    with rabbit.running(tmp_path) as broker_url:
        installation = Installation(database_url, redis_server, model_server, tmp_path, broker_url)
        try:
            _application(installation)
            installation.worker().ready()
            for text in ("report: a", "charge: b"):
                assert _answer(installation, text) == answer_to(text, done(text.partition(":")[0], text))
            text = "fails: c"
            assert _answer(installation, text) == answer_to(text, f"Error: RuntimeError: no paper for {text}")
            installation.check()
        finally:
            installation.close()


def _status(installation: Installation, turn_id: UUID) -> str:
    status: str = read_turn(installation.database, turn_id)["status"]
    return status


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, marks=[] if (kind, str(place)) == ALWAYS else pytest.mark.long)
        for kind in ("report", "charge")
        for place in BOUNDARIES
    ],
    ids=str,
)
def test_after_a_kill_the_task_is_done_once(
    installation: Installation, application: Worker, kind: str, place: Place
) -> None:
    """Wherever a worker dies, the model gets one result. An unsafe task that may have been sent is not sent again."""
    workers = [installation.worker(), installation.worker()]
    for each in workers:
        each.ready()
    text = f"{kind}: {place}"
    installation.faults.arm(place, signal.SIGKILL)
    turn_id = installation.accept(text).turn_id
    struck = wait_until(installation.faults.fired, f"the fault at {place} fires", PATIENCE_S)
    victim = next(each for each in workers if each.pid == struck.pid)
    victim.container.wait()
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
