"""Even if a tool holds the interpreter lock, a turn in its own process ends, because the process is killed."""

from __future__ import annotations

import signal

import psutil
import pytest

from perdure.access.tenants import UserKey
from perdure.sessions.ending import request_end
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.nodes import Worker, has_ended

WITHIN_S = 60.0
TIMEOUT_S = 3
TEXT = "frozen: alone"


def held(installation: Installation, **environment: str) -> tuple[Worker, Accepted, psutil.Process]:
    """Start a worker whose isolated turn holds the interpreter lock; returns the worker, the turn and its process."""
    accepted = installation.accept(TEXT)
    installation.query("UPDATE sessions SET claims = %(claims)s RETURNING 1", claims=ISOLATE_FROM_CLAIM)
    worker = installation.worker(**environment)
    effect = wait_until(lambda: next(iter(installation.faults.effects(TEXT)), None), "the tool is called", WITHIN_S)
    assert effect.pid != worker.pid
    return worker, accepted, psutil.Process(effect.pid)


@pytest.mark.exhaustive
def test_the_time_limit_fails_the_turn(installation: Installation) -> None:
    """At the time limit, the process is killed and the turn fails without another attempt."""
    worker, accepted, child = held(installation, PERDURE_TURN__TIMEOUT_S=str(TIMEOUT_S))

    (turn,) = installation.settled(accepted.turn_id, within_s=WITHIN_S)

    assert has_ended(child)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "TIMEOUT")
    assert turn["reply"]["text"] == f"I could not finish within {TIMEOUT_S} seconds, so I stopped."
    assert len(installation.faults.effects(TEXT)) == 1
    assert worker.container.status == "running"
    later = installation.accept("hello")
    assert [each["status"] for each in installation.settled(later.turn_id)] == ["done"]
    installation.check()


@pytest.mark.exhaustive
def test_a_cancellation_ends_the_process(installation: Installation) -> None:
    """A cancellation kills the process, because the process itself cannot notice the cancellation."""
    _, accepted, child = held(installation)
    cancel(installation.runtime, accepted.turn_id)

    (turn,) = installation.settled(accepted.turn_id, within_s=WITHIN_S)

    assert has_ended(child)
    assert turn["status"] == "cancelled"
    installation.check()


@pytest.mark.exhaustive
def test_a_requested_end_waits_for_the_time_limit(installation: Installation) -> None:
    """A request to end the session does not kill the process. The session ends after the turn has timed out."""
    _, accepted, child = held(installation, PERDURE_TURN__TIMEOUT_S=str(TIMEOUT_S))
    request_end(installation.database, accepted.session_id, "requested")

    (turn,) = installation.settled(accepted.turn_id, within_s=WITHIN_S)

    assert has_ended(child)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "TIMEOUT")
    assert turn["reply"]["text"] == f"I could not finish within {TIMEOUT_S} seconds, so I stopped."
    wait_until(lambda: installation.query("SELECT 1 FROM sessions WHERE ended_at IS NOT NULL"), "the session ends")


@pytest.mark.exhaustive
def test_the_erasure_of_its_user_ends_the_process(installation: Installation) -> None:
    """An erasure of the user kills the process, because the process holds the user's texts."""
    worker, _, child = held(installation)
    installation.runtime.eraser.erase(UserKey("ana"))

    wait_until(lambda: has_ended(child), "the process is killed", WITHIN_S)
    assert worker.container.status == "running"
    assert not installation.query("SELECT 1 FROM turns")


@pytest.mark.exhaustive
def test_the_process_dies_with_its_worker(installation: Installation) -> None:
    """If the worker is killed, the kernel kills the turn's process."""
    worker, _, child = held(installation)
    worker.container.signal(signal.SIGKILL)

    wait_until(lambda: has_ended(child), "the process is killed")
