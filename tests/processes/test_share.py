"""One user floods a fleet of real workers: other users are answered, and a killed worker loses no turn."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from pytest_celery import CeleryTestSetup, CeleryWorkerCluster

from perdure.settings import Scope
from tests.processes.faults import wait_until
from tests.processes.installation import Installation

FLOOD, AT_ONCE = 40, 3


@pytest.fixture
def celery_worker_cluster(installation: Installation) -> CeleryWorkerCluster:
    """Two workers with two threads each. A user's limit of three concurrent turns leaves one thread for other users."""
    settings = installation.runtime.settings
    session = settings.session.model_copy(update={"scope": Scope.CHANNEL})
    turn = settings.turn.model_copy(update={"user_concurrency": AT_ONCE})
    installation.runtime = replace(
        installation.runtime, settings=settings.model_copy(update={"session": session, "turn": turn})
    )
    own = {"PERDURE_TURN__USER_CONCURRENCY": str(AT_ONCE), "PERDURE_SESSION__SCOPE": "channel"}
    cluster = CeleryWorkerCluster(*(installation.worker("--concurrency", "2", **own) for _ in range(2)))
    assert cluster.ready()
    return cluster


@pytest.mark.exhaustive
def test_a_flood_leaves_threads_for_others_and_survives_a_dead_worker(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """While a flooding user's three slow turns run, another user is answered. A killed worker loses no turn."""
    texts = [f"flood {number}" for number in range(FLOOD)]
    gates = {text: installation.model_server.gate(text) for text in texts}
    flood = [installation.accept(text, user="flood", channel=f"channel-{number}") for number, text in enumerate(texts)]

    def running() -> int:
        return sum(gate.arrived.is_set() for gate in gates.values())

    wait_until(lambda: running() == AT_ONCE, "the flood runs up to its limit")
    for number in range(5):
        (turn,) = installation.settled(installation.accept(f"hello {number}", user="ordinary").turn_id, within_s=10)
        assert turn["status"] == "done"
    assert running() == AT_ONCE

    os.kill(installation.workers[0].pid, signal.SIGKILL)
    for gate in gates.values():
        gate.opened.set()
    turns = installation.settled(*(each.turn_id for each in flood), within_s=60)

    assert {turn["status"] for turn in turns} == {"done"}
    assert max(turn["attempts"] for turn in turns) <= 2, "only the dead worker's turns were repeated"
    assert sum(turn["attempts"] for turn in turns) <= FLOOD + 2
    installation.check()
