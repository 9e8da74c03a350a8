"""Hundreds of turns that wait for a slow model, in one process."""

from __future__ import annotations

import psutil
import pytest
from pytest_celery import CeleryTestSetup, CeleryWorkerCluster

from tests.processes.faults import wait_until
from tests.processes.installation import Installation

TURNS = 300
MIB = 2**20
OTHER_THREADS = 60
"""Upper bound on a worker's threads that run no turn, such as those of Celery, the sweeper and the SDK."""


@pytest.fixture
def celery_worker_cluster(installation: Installation) -> CeleryWorkerCluster:
    """One worker with a slot for each turn."""
    cluster = CeleryWorkerCluster(installation.worker("--concurrency", str(TURNS)))
    assert cluster.ready()
    return cluster


@pytest.mark.exhaustive
def test_hundreds_of_turns_wait_at_once(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """A waiting turn costs no more than a thread and a MiB of memory."""
    (worker,) = installation.workers
    process = psutil.Process(worker.pid)
    before = process.memory_info().rss
    gates = [installation.model_server.gate(f"hello {number}") for number in range(TURNS)]
    accepted = [installation.accept(f"hello {number}", user=f"user {number}") for number in range(TURNS)]
    wait_until(lambda: all(gate.arrived.is_set() for gate in gates), "all wait for the model", within_s=60)
    threads, grown = process.num_threads(), process.memory_info().rss - before
    for gate in gates:
        gate.opened.set()
    turns = installation.settled(*(each.turn_id for each in accepted), within_s=60)

    assert {turn["status"] for turn in turns} == {"done"}
    assert threads < TURNS + OTHER_THREADS
    assert grown < TURNS * MIB
    installation.check()
