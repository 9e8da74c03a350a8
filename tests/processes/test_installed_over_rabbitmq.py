"""Tests of perdure in another application, repeated with RabbitMQ as the broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.installation import Installation
from tests.processes.model_server import ModelServer
from tests.processes.nodes import RedisContainer
from tests.processes.test_installed import (  # noqa: F401 (collected)
    opened_shop,
    test_a_shutdown_parks_turns_and_finishes_the_applications_tasks,
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
