"""Tests of `turns.submit` from a program that knows only the broker's URL and the task's name."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from celery.exceptions import TimeoutError as ResultTimeout
from pytest_celery import CeleryTestSetup

from tests.processes.faults import Place, wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

MESSAGES = 20


@pytest.mark.long
def test_the_result_names_the_accepted_turn(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """The task's result contains the turn's id, with which the sender can read the reply."""
    result = celery_setup.app.send_task("turns.submit", kwargs={"user_id": "ana", "text": "hello"}, queue="ingress")
    accepted = result.get(timeout=20)
    assert set(accepted) == {"turn_id", "session_id", "duplicate"}
    assert accepted["duplicate"] is False
    (turn,) = installation.settled(accepted["turn_id"])
    assert turn["reply"]["text"] == answer_to("hello")


@pytest.mark.long
def test_a_task_is_for_a_tenants_user(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """The same user and message id under two tenants give two turns. A malformed tenant or user is refused."""
    given = {"user_id": "ana", "text": "hello", "message_id": "m"}
    sent = [
        celery_setup.app.send_task("turns.submit", kwargs={**given, **more}, queue="ingress").get(timeout=20)
        for more in ({"tenant": "acme"}, {"tenant": "bolt"}, {}, {"tenant": "acme"})
    ]
    assert [each["duplicate"] for each in sent] == [False, False, False, True]
    assert len({each["session_id"] for each in sent}) == 3
    for wrong in ({"tenant": "Acme"}, {"tenant": 5}, {"user_id": "acme\x1fana"}):
        result = celery_setup.app.send_task("turns.submit", kwargs={**given, **wrong}, queue="ingress")
        assert "INVALID_REQUEST: " in str(result.get(timeout=20, propagate=False)), wrong
    users = {row[0] for row in installation.query("SELECT user_id FROM users")}
    assert users == {"acme\x1fana", "bolt\x1fana", "ana"}


@pytest.mark.long
def test_a_task_sent_twice_is_one_turn(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """A task that is sent twice under one id becomes one turn, because brokers and senders may repeat messages."""
    message = {"user_id": "ana", "text": "hello"}
    first, again = (
        celery_setup.app.send_task("turns.submit", kwargs=message, queue="ingress", task_id="the same")
        for _ in range(2)
    )
    accepted = [result.get(timeout=20) for result in (first, again)]
    installation.settled(accepted[0]["turn_id"])
    assert accepted[0]["turn_id"] == accepted[1]["turn_id"]
    assert len(installation.query("SELECT 1 FROM turns")) == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"args": ["ana", "hello"]}, "INVALID_REQUEST"),
    ({"kwargs": {"text": "hello"}}, "INVALID_REQUEST"),
    ({"kwargs": {"user_id": "ana"}}, "INVALID_REQUEST"),
    ({"kwargs": {"user_id": "ana", "text": ""}}, "INVALID_REQUEST"),
    ({"kwargs": {"user_id": "ana", "text": 5}}, "INVALID_REQUEST"),
    ({"kwargs": {"user_id": "ana", "text": "hi", "nonsense": 1}}, "INVALID_REQUEST"),
    ({"kwargs": {"user_id": "ana", "text": "x" * 10_001}}, "TOO_LARGE"),
    ({"kwargs": {"user_id": "ana", "text": "hi", "reply_to": {"task": "os.system"}}}, "INVALID_REQUEST"),
]


@pytest.mark.long
def test_wrong_arguments_fail_with_a_code_and_a_message(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """The error of a task with wrong arguments has a code and a message, but no traceback."""
    for given, code in WRONG:
        result = celery_setup.app.send_task("turns.submit", queue="ingress", **given)
        error = str(result.get(timeout=20, propagate=False))
        assert result.state == "FAILURE", given
        assert f"{code}: " in error
        assert error.rstrip("')").endswith(".")
        assert not result.traceback
    assert len(installation.query("SELECT 1 FROM inbox")) == 0


@pytest.mark.exhaustive
def test_repeated_submissions_survive_killed_workers(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """A worker is killed, and the sender repeats its submissions with the same ids. Each message becomes one turn."""
    texts = {f"task-{number}": f"message {number}" for number in range(MESSAGES)}
    installation.faults.arm(Place("before", "turns.accept", nth=3), signal.SIGKILL)

    def send(task_id: str) -> object:
        message = {"user_id": task_id, "text": texts[task_id]}
        return celery_setup.app.send_task("turns.submit", kwargs=message, queue="ingress", task_id=task_id)

    waiting = {task_id: send(task_id) for task_id in texts}
    wait_until(installation.faults.fired, "a worker dies in the middle")
    accepted = {}
    while waiting:
        for task_id, result in list(waiting.items()):
            try:
                accepted[task_id] = result.get(timeout=1)  # type: ignore[attr-defined]
                del waiting[task_id]
            except ResultTimeout:
                waiting[task_id] = send(task_id)
    turns = installation.settled(*(each["turn_id"] for each in accepted.values()))
    assert [turn["reply"]["text"] for turn in turns] == [answer_to(texts[task_id]) for task_id in accepted]
    assert len(installation.query("SELECT 1 FROM turns")) == MESSAGES
    installation.check()
