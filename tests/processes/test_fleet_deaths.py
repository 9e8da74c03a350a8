"""All workers die at the same moment, twice, during the same turns."""

from __future__ import annotations

import re
import time

import pytest

from tests.processes.faults import wait_until
from tests.processes.installation import Installation

TURNS = 16
LEASE = {"PERDURE_TURN__LEASE_S": "15", "PERDURE_TURN__HEARTBEAT_S": "5", "PERDURE_TURN__SWEEP_S": "1"}
"""The start of an interpreter must be short in comparison with the lease, as it is with the default of 30 s."""
WITHIN_S = 60.0


def _called(installation: Installation, texts: list[str], times: int) -> bool:
    return all(len(installation.model_server.called_at[text]) >= times for text in texts)


def _answered_after(installation: Installation, prefix: str, deaths: int) -> float:
    """Kill both workers `deaths` times during the same turns; returns the seconds from the last start to the end."""
    installation.model_server.latency_s = 60.0
    texts = [f"{prefix} {number}" for number in range(TURNS)]
    sent = [installation.accept(text, user=text) for text in texts]
    for death in range(1, deaths + 1):
        wait_until(lambda times=death: _called(installation, texts, times), "every turn is in a model call", WITHIN_S)  # type: ignore[misc]
        for worker in installation.workers:
            worker.kill("SIGKILL")
        if death == deaths:
            installation.model_server.latency_s = 0.0
        began = time.monotonic()
        for worker in installation.workers:
            worker.container.start()
    turns = installation.settled(*(each.turn_id for each in sent), within_s=WITHIN_S)
    assert [turn["status"] for turn in turns] == ["done"] * TURNS
    return time.monotonic() - began


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_fleet_that_dies_twice_answers_as_soon_as_one_that_dies_once(installation: Installation) -> None:
    """After the second death, one turn of each process runs in a child process. The other turns are not suspected."""
    for _ in range(2):
        installation.worker(**LEASE)
    once = _answered_after(installation, "once", 1)
    twice = _answered_after(installation, "twice", 2)
    logs = "".join(worker.logs() for worker in installation.workers)
    alone = set(re.findall(r"session (\S+): its turn was claimed 2 times and must run in a child process", logs))
    assert 1 <= len(alone) <= len(installation.workers)
    assert twice <= 2 * once, f"{once:.1f} s after one death, {twice:.1f} s after two"
    installation.check()
