"""Tools that are tasks of another Celery application: kill -9 at each boundary, and outcomes of every kind."""

from __future__ import annotations

import signal

import pytest

from perdure.turns.calls.result_values import LOST
from perdure.turns.reading import read_turn
from tests.processes.faults import SCENE, Place, done, wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to
from tests.processes.nodes import Worker, WorkerContainer
from tests.processes.reports import URL

PATIENCE_S = 60.0

pytestmark = pytest.mark.timeout(240)

BOUNDARIES = [
    Place("after", "turns.step"),  # the intent is committed, nothing is sent
    Place("before", "turns.note_sent"),  # sent, and not noted
    Place("after", "turns.note_sent"),
    Place("before", "turns.wait_calls"),
    Place("after", "turns.wait_calls"),
    Place("before", "turns.finish_task"),  # the result has arrived
    Place("after", "turns.finish_task"),
    Place("after", "turns.claim", 2),  # the turn resumes
    Place("before", "turns.step", 2),
    Place("after", "turns.step", 2),
]
ALWAYS = {"before-turns.note_sent-1", "before-turns.finish_task-1"}
"""The boundaries at which `make test` kills, too."""


@pytest.fixture
def application(installation: Installation) -> Worker:
    """The application's worker."""
    environment = {
        **{name: value for name, value in installation.environment.items() if "PERDURE" not in name},
        URL: installation.redis.url,
        SCENE: str(installation.directory),
    }
    container = WorkerContainer("reports", environment, installation.directory, (), "tests.processes.reports")
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


def test_every_outcome_of_a_task_reaches_the_model(installation: Installation, application: Worker) -> None:
    """A result, an error, what is not JSON, no stored result, a task that no worker knows, progress."""
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

    assert wait_until(progress, "its progress is shown", PATIENCE_S) == '{"done": 1, "of": 2}'
    installation.faults.let_go()
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert turn["reply"]["text"] == answer_to(text, done("slow report", text))
    installation.check()


@pytest.mark.parametrize("kind", ["report", "charge"])
@pytest.mark.parametrize(
    "place",
    [each if str(each) in ALWAYS else pytest.param(each, marks=pytest.mark.long) for each in BOUNDARIES],
    ids=str,
)
def test_killed_there_the_task_is_done_once(
    installation: Installation, application: Worker, kind: str, place: Place
) -> None:
    """Wherever a worker dies, the result arrives once; an unsafe task that may be sent is not sent again."""
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
