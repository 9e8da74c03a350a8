"""Another worker continues a killed worker's turn. A worker that resumes after its lease has expired writes nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import product

import pytest
from pytest_celery import CeleryTestSetup

from tests.processes.faults import Place, done, wait_until
from tests.processes.installation import LEASE_S, RECOVERY_S, Installation
from tests.processes.model_server import answer_to
from tests.processes.nodes import Worker

PAST_LEASE_S = LEASE_S * 2


@pytest.mark.long
@pytest.mark.parametrize("deaths", [1, 4])
def test_another_worker_continues_within_lease_and_sweep(
    celery_setup: CeleryTestSetup, installation: Installation, deaths: int
) -> None:
    """A killed worker delays its turns by at most the lease, one sweep interval and three seconds."""
    for _ in range(deaths):
        text = f"pure: {time.monotonic_ns()}"
        gate = installation.model_server.gate(text, nth=2)
        accepted = installation.accept(text)
        gate.wait()
        owner = installation.lease_owner(accepted.session_id)
        victim = next(each for each in installation.workers if each.pid == owner)
        killed_at = time.monotonic()
        victim.kill()
        gate.opened.set()
        installation.settled(accepted.turn_id)
        settled_at = min(
            note.at for note in installation.faults.notes() if note.at > killed_at and note.name == "turns.settle"
        )
        assert settled_at - killed_at < RECOVERY_S
        victim.container.start()
        victim.container.ready()
    installation.check()


@pytest.fixture
def stopped(celery_setup: CeleryTestSetup, installation: Installation) -> Iterator[Stopped]:
    """Controls a worker that the test pauses with SIGSTOP. The worker is resumed after the test."""
    made = Stopped(installation)
    yield made
    made.resume()


class Stopped:
    """A worker that is paused until its lease has expired and another worker has continued its work."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self.worker: Worker | None = None

    def found(self, pid: int) -> None:
        """Record that the worker `pid` is paused."""
        self.worker = next(each for each in self._installation.workers if each.pid == pid)

    def at(self, place: Place) -> None:
        """Wait until the armed fault has paused a worker at `place`."""
        self.found(wait_until(self._installation.faults.fired, f"a worker stops at {place}").pid)

    def resume(self) -> None:
        """Resume the worker."""
        if self.worker is not None:
            os.kill(self.worker.pid, signal.SIGCONT)

    def writes_nothing_and_lives(self) -> None:
        """Resume the worker. Assert that it changes no table, and that it runs a new turn as the only worker."""
        installation, worker = self._installation, self.worker
        assert worker is not None
        before = installation.snapshot()
        marks = len(installation.faults.notes())
        self.resume()
        wait_until(
            lambda: [note for note in installation.faults.notes(marks) if note.pid == worker.pid], "it runs again"
        )
        # After four sweeps, the worker has had at least one heartbeat and one whole sweep.
        wait_until(lambda: self._sweeps(marks) >= 4, "the worker has had time to write")
        assert installation.snapshot() == before
        for other in installation.workers:
            if other is not worker:
                other.kill()
        later = installation.accept("still there?", user="new user")
        (turn,) = installation.settled(later.turn_id)
        assert turn["status"] == "done"
        installation.check()

    def _sweeps(self, marks: int) -> int:
        assert self.worker is not None
        pid = self.worker.pid
        notes = self._installation.faults.notes(marks)
        return sum(1 for note in notes if note.pid == pid and (note.moment, note.name) == ("after", "sweep.take"))


@pytest.mark.long
def test_a_worker_stopped_in_a_model_call(stopped: Stopped, installation: Installation) -> None:
    """The resumed worker does not write the model's answer, because another worker has repeated the call."""
    gate = installation.model_server.gate("hello")
    accepted = installation.accept("hello")
    gate.wait()
    pid = installation.lease_owner(accepted.session_id)
    os.kill(pid, signal.SIGSTOP)
    stopped.found(pid)
    _continues_elsewhere(installation, "hello", str(accepted.turn_id))
    gate.opened.set()
    stopped.writes_nothing_and_lives()


@pytest.mark.long
@pytest.mark.parametrize(("tool", "point"), [*product(["pure", "probed", "unsafe"], ["entered", "acted"])])
def test_a_worker_stopped_in_a_tool(stopped: Stopped, installation: Installation, tool: str, point: str) -> None:
    """The resumed worker does not write the tool's result: another worker has recorded the call's outcome."""
    place = Place("within", f"{tool}.{point}")
    installation.faults.arm(place, signal.SIGSTOP)
    accepted = installation.accept(f"{tool}: stop")
    stopped.at(place)
    installation.settled(accepted.turn_id, within_s=RECOVERY_S)
    stopped.writes_nothing_and_lives()


@pytest.mark.long
@pytest.mark.parametrize("place", [Place("before", "turns.step", 2), Place("before", "turns.settle")], ids=str)
def test_a_worker_stopped_before_its_commit(stopped: Stopped, installation: Installation, place: Place) -> None:
    """The resumed worker's commit changes nothing, because the worker's token is stale."""
    installation.faults.arm(place, signal.SIGSTOP)
    accepted = installation.accept("pure: stop")
    stopped.at(place)
    _continues_elsewhere(installation, "pure: stop", str(accepted.turn_id), done("pure", "pure: stop"))
    stopped.writes_nothing_and_lives()


@pytest.mark.long
def test_a_worker_stopped_between_update_and_commit(
    stopped: Stopped, celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """PostgreSQL rolls back the stopped worker's transaction. The resumed worker repeats the transaction."""
    gate = installation.model_server.gate("first")
    first = installation.accept("first")
    gate.wait()
    place = Place("before", "turns.accept")
    installation.faults.arm(place, signal.SIGSTOP)
    message = {"user_id": "ana", "text": "second", "on_busy": "interrupt"}
    result = celery_setup.app.send_task("turns.submit", kwargs=message, queue="ingress", task_id="second")
    stopped.at(place)
    gate.opened.set()

    (turn,) = installation.settled(first.turn_id, within_s=RECOVERY_S)
    assert turn["status"] == "done", "the interruption was never committed"
    assert not installation.query("SELECT 1 FROM inbox WHERE text = 'second'")

    stopped.resume()
    accepted = result.get(timeout=20)
    assert accepted["duplicate"] is False, "the resumed worker tried again, and accepted the message"
    (second,) = installation.settled(accepted["turn_id"])
    assert second["status"] == "done"
    installation.check()


@pytest.mark.long
@pytest.mark.parametrize("name", ["sweep.take", "sweep.wake_due"])
def test_a_worker_stopped_while_sweeping(stopped: Stopped, installation: Installation, name: str) -> None:
    """While one worker is paused in a sweep, another worker runs the next sweep."""
    place = Place("after" if name == "sweep.take" else "before", name)
    installation.faults.arm(place, signal.SIGSTOP)
    stopped.at(place)
    installation.redis.flush()
    accepted = installation.accept("pure: swept")
    installation.redis.flush()
    installation.settled(accepted.turn_id, within_s=RECOVERY_S)
    stopped.writes_nothing_and_lives()


def _continues_elsewhere(installation: Installation, text: str, turn_id: str, *results: str) -> None:
    (turn,) = installation.settled(turn_id, within_s=RECOVERY_S)
    assert turn["status"] == "done"
    assert turn["reply"] == {"text": answer_to(text, *results), "format": "text", "stop_reason": "stop"}
