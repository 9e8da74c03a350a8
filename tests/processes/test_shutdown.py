"""SIGTERM: a deploy costs a turn nothing but a repeated model call."""

from __future__ import annotations

import signal
import time

import psutil
from pytest_celery import CeleryTestSetup

from perdure.turns.lease import ISOLATE_FROM_CLAIM
from tests.processes.installation import DRAIN_S, Installation
from tests.processes.mind import answer_to
from tests.processes.scene import Place, done, wait_until


def test_a_turn_in_a_model_call_is_parked_and_finished_elsewhere(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """A worker that is told to leave hands on what it cannot finish, at once and for free."""
    gate = installation.mind.gate("hello")
    accepted = installation.accept("hello")
    gate.wait()
    owner = installation.lease_owner(accepted.session_id)
    leaving = next(worker for worker in installation.workers if worker.pid == owner)

    told_at = time.monotonic()
    leaving.kill(signal.SIGTERM)
    (turn,) = installation.settled(accepted.turn_id)
    settled_at = max(note.at for note in installation.scene.notes() if note.name == "turns.settle")

    assert leaving.container.wait() == 0
    assert turn["reply"]["text"] == answer_to("hello")
    assert settled_at - told_at < DRAIN_S + 2
    parked = [note for note in installation.scene.notes() if note.name == "turns.park"]
    assert {note.pid for note in parked} == {leaving.pid}
    strikes = installation.query("SELECT strikes FROM sessions")[0].strikes
    assert strikes == 0
    installation.check()


def test_a_tool_call_under_way_is_awaited(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """A side effect that has begun is seen to its end, so that nobody need wonder about it."""
    installation.scene.arm(Place("within", "unsafe.entered"), signal.SIGTERM)
    accepted = installation.accept("unsafe: quick")
    (turn,) = installation.settled(accepted.turn_id)
    struck = wait_until(installation.scene.fired, "a worker is told to leave, amid its tool")
    leaving = next(worker for worker in installation.workers if worker.pid == struck.pid)
    assert leaving.container.wait() == 0
    assert turn["reply"]["text"] == answer_to("unsafe: quick", done("unsafe", "unsafe: quick"))
    assert [effect.pid for effect in installation.scene.effects()] == [leaving.pid]
    installation.check()


def test_an_isolated_turn_leaves_with_its_worker(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """A turn in a process of its own is parked like any other, and holds nobody's shutdown up."""
    gate = installation.mind.gate("hello", nth=1)
    accepted = installation.accept("hello")
    for deaths in range(1, ISOLATE_FROM_CLAIM + 1):
        gate.wait()
        owner = installation.lease_owner(accepted.session_id)
        victim = next(worker for worker in installation.workers if worker.pid == owner)
        gate = installation.mind.gate("hello", nth=deaths + 1)
        victim.kill()
        victim.container.start()
    gate.wait()
    isolated = psutil.Process(installation.lease_owner(accepted.session_id))
    leaving = next(worker for worker in installation.workers if worker.pid == isolated.ppid())

    leaving.kill(signal.SIGTERM)

    assert leaving.container.wait() == 0
    assert not isolated.is_running()
    (turn,) = installation.settled(accepted.turn_id)
    assert turn["reply"]["text"] == answer_to("hello")
    installation.check()
