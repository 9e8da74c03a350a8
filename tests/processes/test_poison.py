"""A turn that kills its process in each attempt, while other turns run."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup

from tests.processes.installation import Installation

BYSTANDERS = 10
MAX_ATTEMPTS = 5
ALONE_S = 150.0
"""Time limit for all attempts, in seconds. Each isolated attempt starts an interpreter."""
SHARED_ATTEMPTS = 2
"""Attempts in the worker's own process. Later attempts run in a separate process."""


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize("worker_count", [1])
def test_a_turn_that_kills_its_process_fails_and_concurrent_turns_do_not(
    celery_setup: CeleryTestSetup, installation: Installation, worker_count: int
) -> None:
    """A turn that kills its process fails after its last attempt. The ten turns that run concurrently succeed."""
    (worker,) = installation.workers
    pids = [worker.pid]
    # The worker is killed while the bystanders' turns are in model calls. The model replies after the second kill.
    gates = [installation.model_server.gate(f"hello {number}", nth=1) for number in range(BYSTANDERS)]
    bystanders = [installation.accept(f"hello {number}", user=f"bystander {number}") for number in range(BYSTANDERS)]
    for gate in gates:
        gate.wait()
    poison = installation.accept("deadly: dose", user="poisoner")

    for _ in range(SHARED_ATTEMPTS):
        worker.container.wait()
        worker.container.start()
        pids.append(worker.pid)
    for gate in gates:
        gate.opened.set()
    given_up, *others = installation.settled(poison.turn_id, *(each.turn_id for each in bystanders), within_s=ALONE_S)

    assert [turn["status"] for turn in others] == ["done"] * BYSTANDERS
    assert given_up["status"] == "failed"
    assert given_up["error"]["code"] == "BUDGET_EXHAUSTED"
    assert str(MAX_ATTEMPTS) in given_up["reply"]["text"]
    assert worker.container.status == "running"
    assert worker.pid == pids[-1], "the worker was not killed again"
    killers = [effect.pid for effect in installation.faults.effects("deadly: dose")]
    shared = [pid for pid in killers if pid in pids]
    assert len(shared) == SHARED_ATTEMPTS
    assert len(killers) > len(shared), "some attempts ran in isolation"
    assert len(set(killers)) == len(killers), "no process ran two attempts"
    alone = [line for line in worker.logs().splitlines() if f"{poison.session_id} ended earlier processes" in line]
    assert len(alone) == len(killers) - len(shared), "each attempt alone has one process"
    installation.check()
