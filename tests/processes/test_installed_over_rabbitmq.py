"""perdure in an application whose broker is RabbitMQ: tests that also run over Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.installation import Installation
from tests.processes.model_server import ModelServer
from tests.processes.nodes import RedisContainer
from tests.processes.test_installed import (  # noqa: F401 (collected)
    opened_shop,
    test_a_turn_of_a_killed_worker_goes_on_elsewhere,
    test_a_worker_that_leaves_parks_turns_and_ends_its_own_tasks,
    test_an_applications_worker_runs_its_tasks_and_turns,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.fixture
def installation(
    database_url: str, redis_server: RedisContainer, model_server: ModelServer, tmp_path: Path, rabbitmq: str
) -> Iterator[Installation]:
    """An installation over RabbitMQ, without workers."""
    made = Installation(database_url, redis_server, model_server, tmp_path, rabbitmq)
    yield made
    made.close()
