"""Tests of perdure in another application, repeated with RabbitMQ as the broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Perdure
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import ModelServer, answer_to
from tests.processes.nodes import RedisContainer
from tests.processes.test_installed import (  # noqa: F401 (collected)
    AT_ONCE_S,
    Shop,
    opened_shop,
    test_a_shutdown_parks_turns_and_finishes_the_applications_tasks,
    test_an_application_need_not_accept_json,
    test_an_applications_worker_runs_its_tasks_and_turns,
    test_another_worker_continues_a_killed_workers_turn,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(200)]


@pytest.fixture
def installation(
    database_url: str, redis_server: RedisContainer, model_server: ModelServer, tmp_path: Path, rabbitmq: str
) -> Iterator[Installation]:
    """An installation with RabbitMQ as the broker, without workers."""
    made = Installation(database_url, redis_server, model_server, tmp_path, rabbitmq)
    yield made
    made.close()


def test_a_drain_is_resumed(installation: Installation, shop: Shop, perdure: Perdure) -> None:
    """After a drain, an application's worker consumes perdure's queues, which lack its maximum priority."""
    worker = shop.perdures()
    assert perdure("drain", "--json").returncode == 0
    wait_until(lambda: "the intake is closed" in worker.logs(), "the worker pauses", AT_ONCE_S)
    accepted = installation.accept("hello")
    assert perdure("drain", "--resume").returncode == 0
    (turn,) = installation.settled(accepted.turn_id, within_s=AT_ONCE_S)
    assert turn["reply"]["text"] == answer_to("hello")
    shop.app.send_task("turns.submit", kwargs={"user_id": "bea", "text": "hello"})
    wait_until(lambda: len(installation.query("SELECT turn_id FROM turns")) == 2, "the submission is accepted")
    assert worker.container.status == "running"
