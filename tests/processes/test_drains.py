"""Real workers drain a backlog with few wake-ups, and a worker that ends leaves nothing behind.

The sweeper's rounds are a minute apart here: whatever is answered earlier was answered without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from pytest_celery import CeleryTestSetup, CeleryWorkerCluster

from perdure.turns.inbox.accept import Accepted
from perdure.workers.publish.wake import ENOUGH
from tests.processes.faults import wait_until
from tests.processes.installation import Installation

THREADS = 2
BACKLOG = 150


@pytest.fixture
def celery_worker_cluster(installation: Installation) -> CeleryWorkerCluster:
    """Two workers with two threads each, which sweep once a minute."""
    own = {"PERDURE_TURN__SWEEP_S": "60"}
    cluster = CeleryWorkerCluster(*(installation.worker("--concurrency", str(THREADS), **own) for _ in range(2)))
    assert cluster.ready()
    return cluster


def _busy(installation: Installation) -> tuple[list[Accepted], Callable[[], None]]:
    """Occupy all threads of both workers; returns the turns, and a function that lets them end."""
    texts = [f"slow {number}" for number in range(2 * THREADS)]
    gates = [installation.model_server.gate(text) for text in texts]
    sent = [installation.accept(text, user=text.replace(" ", "-")) for text in texts]
    wait_until(lambda: all(gate.arrived.is_set() for gate in gates), "all threads run a turn")

    def release() -> None:
        for gate in gates:
            gate.opened.set()

    return sent, release


def _accept(installation: Installation, number: int) -> list[Accepted]:
    return [installation.accept(f"message {each}", user=f"user-{each}") for each in range(number)]


def _received(installation: Installation) -> int:
    """The number of wake-ups that the workers have run."""
    lines = sum(str(worker.logs()).count("Task turns.run[") for worker in installation.workers)
    return lines // 2  # received, succeeded


@pytest.mark.exhaustive
def test_a_backlog_takes_few_wake_ups(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """While all threads are busy, `ENOUGH` wake-ups wait. They lead to the answers to all messages."""
    slow, release = _busy(installation)
    before = _received(installation)
    sent = _accept(installation, BACKLOG)
    release()
    turns = installation.settled(*(each.turn_id for each in [*slow, *sent]), within_s=60)
    assert {turn["status"] for turn in turns} == {"done"}
    assert {turn["attempts"] for turn in turns} == {1}
    assert _received(installation) - before <= ENOUGH + BACKLOG // 5
    (alone,) = installation.settled(installation.accept("and now?", user="late").turn_id, within_s=10)
    assert alone["status"] == "done"
    installation.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_ends_leaves_its_backlog_to_another(
    celery_setup: CeleryTestSetup, installation: Installation, number: signal.Signals
) -> None:
    """The messages for which no wake-up was published are answered by the other worker; so is a lone one after them."""
    slow, release = _busy(installation)
    sent = _accept(installation, BACKLOG // 2)
    os.kill(installation.workers[0].pid, number)
    release()
    late = installation.accept("after the end", user="late")
    turns = installation.settled(*(each.turn_id for each in [*sent, late]), within_s=60)
    assert {turn["status"] for turn in turns} == {"done"}
    (alone,) = installation.settled(installation.accept("and now?", user="later").turn_id, within_s=10)
    assert alone["status"] == "done"
    if number is signal.SIGTERM:
        settled = installation.settled(*(each.turn_id for each in slow))
        assert {turn["status"] for turn in settled} == {"done"}
        installation.check()
