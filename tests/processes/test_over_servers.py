"""Tests of durable turns, repeated over PgBouncer in transaction mode and over RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import shared_directory
from tests.processes import pooler, rabbit
from tests.processes.installation import Installation
from tests.processes.model_server import ModelServer
from tests.processes.nodes import RedisContainer
from tests.processes.test_order import (  # noqa: F401 (collected)
    test_messages_sent_at_once_are_answered_in_the_order_accepted,
)
from tests.processes.test_recovery import (  # noqa: F401 (collected)
    stopped,
    test_a_worker_stopped_in_a_tool,
    test_another_worker_continues_within_lease_and_sweep,
)
from tests.processes.test_replies import test_a_reply_is_posted_until_the_receiver_accepts_it  # noqa: F401 (collected)
from tests.processes.test_shutdown import (  # noqa: F401 (collected)
    test_a_turn_in_a_model_call_is_parked_and_finished_elsewhere,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.fixture
def pooled_url(database_url: str, pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of the test's database behind PgBouncer."""
    with pooler.running(database_url, shared_directory(pytestconfig) / "postgres" / "access") as url:
        yield url


@pytest.fixture(params=["pgbouncer", "rabbitmq"])
def installation(
    request: pytest.FixtureRequest,
    database_url: str,
    redis_server: RedisContainer,
    model_server: ModelServer,
    tmp_path: Path,
) -> Iterator[Installation]:
    """An installation over PgBouncer or RabbitMQ, without workers."""
    broker_url = pooled_url = None
    if request.param == "rabbitmq":
        broker_url = request.getfixturevalue("rabbitmq")
    else:
        pooled_url = request.getfixturevalue("pooled_url")
    made = Installation(database_url, redis_server, model_server, tmp_path, broker_url, pooled_url=pooled_url)
    yield made
    made.close()
    if broker_url is not None:
        rabbit.empty_queues(made.waker.app, broker_url)
