"""SIGTERM: a deploy costs a turn nothing but a repeated model call."""

from __future__ import annotations

import re
import signal
import time
from datetime import datetime
from typing import Any

import psutil
import pytest
import redis as redis_py
from pytest_celery import CeleryTestSetup

from perdure.turns.inbox import Accepted
from perdure.turns.lease import ISOLATE_FROM_CLAIM
from tests.processes.installation import DRAIN_S, Installation
from tests.processes.mind import answer_to
from tests.processes.nodes import Worker
from tests.processes.scene import Place, done, wait_until
from workers.embedded.redis import client_url

PATIENT = {"PERDURE_SHUTDOWN__DRAIN_S": "50", "PERDURE_SHUTDOWN__HARD_EXIT_S": "60"}
"""A worker that would wait for longer than its test."""

PHASE = re.compile(r"shutdown, (\d) of 4")


def _told(worker: Worker, *numbers: signal.Signals) -> None:
    """Send signals, each after the one before was heard."""
    for heard, number in zip(("to drain", "parks"), numbers, strict=False):
        worker.container.signal(number)
        wait_until(lambda heard=heard: heard in worker.logs(), f"{worker.name()} hears {number.name}")  # type: ignore[misc]


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
    assert PHASE.findall(leaving.logs()) == ["1", "2", "3", "4"]
    parked = [note for note in installation.scene.notes() if note.name == "turns.park"]
    assert {note.pid for note in parked} == {leaving.pid}
    strikes = installation.query("SELECT strikes FROM sessions")[0].strikes
    assert strikes == 0
    installation.check()


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_what_was_fetched_and_has_not_begun_is_handed_back_at_once(installation: Installation) -> None:
    """Others go on with it while the worker still drains; the sweeper, which is far off here, is not needed."""
    rare = {**PATIENT, "PERDURE_TURN__SWEEP_S": "60"}
    gates = [installation.mind.gate(f"slow {number}") for number in range(2)]
    leaving = installation.worker("--concurrency=2", **rare)
    leaving.container.ready()
    for number, gate in enumerate(gates):
        installation.accept(f"slow {number}", user=f"slow {number}")
        gate.wait()
    held = [installation.accept("quick", user=f"quick {number}") for number in range(2)]
    wait_until(lambda: _unacknowledged(installation) == 2, "the worker has fetched what it cannot begin")
    installation.worker(**rare).container.ready()
    assert _unacknowledged(installation) == 2

    leaving.container.signal(signal.SIGTERM)

    assert [turn["status"] for turn in installation.settled(*(each.turn_id for each in held))] == ["done"] * 2
    assert leaving.container.status == "running"
    assert "handed back 2 of 2" in leaving.logs()
    for gate in gates:
        gate.opened.set()
    assert leaving.container.wait() == 0
    wait_until(lambda: not _unsettled(installation), "all is settled")
    installation.check()


@pytest.mark.long
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_hastens(installation: Installation, first: signal.Signals) -> None:
    """The drain's deadline is now; nothing is lost by it, and the status is still 0."""
    gate = installation.mind.gate("hello")
    leaving = installation.worker(**PATIENT)
    leaving.container.ready()
    accepted = installation.accept("hello")
    gate.wait()

    _told(leaving, first, signal.SIGINT)

    assert leaving.container.wait() == 0
    assert installation.query("SELECT status FROM turns")[0].status == "parked"
    installation.worker()
    assert installation.settled(accepted.turn_id)[0]["reply"]["text"] == answer_to("hello")
    installation.check()


@pytest.mark.long
def test_at_the_hard_limit_leases_are_given_back(installation: Installation) -> None:
    """A tool that never ends costs its process a status of 1, and its session no wait for the lease."""
    long_lease = {"PERDURE_TURN__LEASE_S": "90", "PERDURE_TURN__HEARTBEAT_S": "10", "PERDURE_TURN__TOOL_TIMEOUT_S": "5"}
    limits = {"PERDURE_SHUTDOWN__DRAIN_S": "0.2", "PERDURE_SHUTDOWN__HARD_EXIT_S": "1.5"}
    leaving = installation.worker(**long_lease, **limits)
    leaving.container.ready()
    accepted = installation.accept("stuck: now")
    wait_until(lambda: installation.scene.effects("stuck: now"), "the tool is called")

    began = time.monotonic()
    leaving.container.signal(signal.SIGTERM)

    assert leaving.container.wait() == 1
    assert time.monotonic() - began < 15
    (session,) = installation.query("SELECT lease_until, strikes FROM sessions")
    assert (session.lease_until, session.strikes) == (None, 0)
    installation.worker(**long_lease)
    (turn,) = installation.settled(accepted.turn_id)
    assert turn["reply"]["text"] == answer_to("stuck: now", done("stuck", "stuck: now"))
    assert len(installation.scene.effects("stuck: now")) == 2
    installation.check()


@pytest.mark.long
def test_a_rolling_restart_loses_and_delays_nothing(installation: Installation) -> None:
    """Three workers are replaced one by one under load, with model calls about as long as the drain."""
    latency_s = installation.mind.latency_s = DRAIN_S * 1.2
    workers = [installation.worker() for _ in range(3)]
    for worker in workers:
        worker.container.ready()
    accepted: list[Accepted] = []

    def load(messages: int) -> None:
        for _ in range(messages):
            number = len(accepted)
            accepted.append(installation.accept(f"hello {number}", user=f"user {number}"))

    for worker in workers:
        load(20)
        began = time.monotonic()
        worker.container.signal(signal.SIGTERM)
        load(5)
        assert worker.container.wait() == 0
        assert time.monotonic() - began < 10, "within the hard limit"
        worker.container.start()
        load(5)
        worker.container.ready()

    turns = installation.settled(*(each.turn_id for each in accepted))
    assert {turn["status"] for turn in turns} == {"done"}
    assert max(turn["attempts"] for turn in turns) > 1, "some were parked"
    late = sorted(_took_s(turn) - turn["attempts"] * latency_s for turn in turns)
    assert late[int(len(late) * 0.9)] < 2, "beyond the model call that each repeats"
    assert late[-1] < 10
    installation.check()


def _took_s(turn: dict[str, Any]) -> float:
    accepted_at, settled_at = (datetime.fromisoformat(turn[name]) for name in ("accepted_at", "settled_at"))
    return (settled_at - accepted_at).total_seconds()


def _unacknowledged(installation: Installation) -> int:
    with redis_py.Redis.from_url(client_url(installation.redis.url)) as client:
        return int(client.hlen("unacked"))


def _unsettled(installation: Installation) -> int:
    return int(installation.query("SELECT count(*) AS n FROM turns WHERE settled_at IS NULL")[0].n)
