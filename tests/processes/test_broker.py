"""If Redis is flushed, restarted, stopped or unresponsive, messages are delayed but not lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pytest_celery import CeleryTestSetup

from perdure.turns.inbox.accept import Accepted
from tests.processes.faults import wait_until
from tests.processes.installation import Installation

MESSAGES = 200
SESSIONS = 40
SENDERS = 8
ANSWERS_WITHIN_S = 6.0
"""Seconds within which a message must be accepted.

The limit is several times the longest wait for the broker, because the machine may be busy.
"""
TIMED_OUT = 5


def _flush(installation: Installation) -> None:
    installation.redis.flush()


def _restart(installation: Installation) -> None:
    installation.redis.restart()


def _lose_all(installation: Installation) -> None:
    installation.redis.flush()
    installation.redis.restart()


@pytest.mark.long
@pytest.mark.parametrize(
    "disturb",
    [_flush, _restart, _lose_all],
)
def test_messages_in_flight_survive_a_flush_and_a_restart_of_redis(
    celery_setup: CeleryTestSetup, installation: Installation, disturb: Callable[[Installation], None]
) -> None:
    """Messages are rows in PostgreSQL, so they survive the loss of the queues, which hold only wake-ups."""
    installation.model_server.latency_s = 0.05
    with ThreadPoolExecutor(SENDERS) as senders:
        sending = [
            senders.submit(installation.accept, f"message {number}", user=f"user {number % SESSIONS}")
            for number in range(MESSAGES)
        ]
        sending[MESSAGES // 4].result()
        disturb(installation)
        sending[MESSAGES // 2].result()
        disturb(installation)
        accepted = [each.result() for each in sending]
    _all_are_answered(installation, accepted)


@pytest.mark.long
@pytest.mark.parametrize("silence", ["SIGKILL", "SIGSTOP"])
def test_messages_are_accepted_while_redis_is_unavailable(
    celery_setup: CeleryTestSetup, installation: Installation, silence: str
) -> None:
    """Each message is accepted within seconds while the broker refuses connections or is unresponsive."""
    pids = [worker.pid for worker in installation.workers]
    before = installation.accept("before")
    installation.redis.kill(silence)
    accepted, longest_s = [before], 0.0
    for number in range(12):
        began = time.monotonic()
        accepted.append(installation.accept(f"message {number}", user=f"user {number % 3}"))
        longest_s = max(longest_s, time.monotonic() - began)
    assert longest_s < ANSWERS_WITHIN_S
    if silence == "SIGSTOP":
        installation.redis.kill("SIGCONT")
    else:
        installation.redis.start()
    _all_are_answered(installation, accepted)
    assert [worker.pid for worker in installation.workers if worker.container.status == "running"] == pids


@pytest.mark.exhaustive
def test_a_silent_redis_hangs_no_worker(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """Workers time out if Redis is unresponsive but keeps connections open, and recover when Redis responds again."""
    installation.settled(installation.accept("before").turn_id)
    installation.redis.kill("SIGSTOP")
    accepted = installation.accept("meanwhile")
    wait_until(
        lambda: sum(worker.logs().count("the broker did not accept") for worker in installation.workers) >= TIMED_OUT,
        "the workers' waits have timed out several times",
    )
    installation.redis.kill("SIGCONT")
    _all_are_answered(installation, [accepted, installation.accept("after")])


def _all_are_answered(installation: Installation, accepted: list[Accepted]) -> None:
    turns = installation.settled(*(each.turn_id for each in accepted), within_s=60)
    assert {turn["status"] for turn in turns} == {"done"}
    installation.check()
