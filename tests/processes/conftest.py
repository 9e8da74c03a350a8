"""pytest-celery's fixtures, implemented with embedded servers and worker processes.

`celery_setup` and the fixtures of clusters have the names that pytest-celery requires. Each test has one embedded
Redis, which is both the broker and the result backend. A worker is a process (see `nodes`). A test sets the number of
workers with `@pytest.mark.parametrize("worker_count", [1])`. The report of a failed test contains its workers' logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryTestSetup, CeleryWorkerCluster

from tests.cli.conftest import Perdure
from tests.processes import nodes, rabbit
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import ModelServer
from tests.processes.neighbourhood import Neighbour
from tests.processes.nodes import RedisBackend, RedisBroker, RedisContainer, Setup
from tests.processes.receiver import Receiver

_LOG_TAIL = 12_000
_installations = pytest.StashKey[list[Installation]]()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail if a worker process still runs at the end of the pytest session."""
    yield
    assert nodes.left_over() == []


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    """A server that answers the workers' model calls."""
    made = ModelServer()
    with made.server:
        yield made
        made.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An HTTP service that receives replies."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisContainer]:
    """The Redis of this test."""
    container = RedisContainer("redis", tmp_path / "redis")
    yield container
    container.teardown()


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one RabbitMQ for all tests of a module."""
    with rabbit.running(tmp_path_factory.mktemp("rabbitmq")) as url:
        yield url


@pytest.fixture
def broker_url() -> str | None:
    """The URL of the broker; `None`: Redis is the broker."""
    return None


@pytest.fixture
def pooled_url() -> str | None:
    """The URL of the database behind a pooler, if there is one."""
    return None


@pytest.fixture
def installation(  # noqa: PLR0917 (fixtures, given by name)
    request: pytest.FixtureRequest,
    database_url: str,
    redis_server: RedisContainer,
    model_server: ModelServer,
    tmp_path: Path,
    broker_url: str | None,
    pooled_url: str | None,
) -> Iterator[Installation]:
    """An installation without workers."""
    made = Installation(database_url, redis_server, model_server, tmp_path, broker_url, pooled_url=pooled_url)
    request.node.stash.setdefault(_installations, []).append(made)
    yield made
    made.close()


@pytest.fixture
def neighbour(installation: Installation, tmp_path: Path) -> Iterator[Neighbour]:
    """Another Celery application on the installation's Redis database, without a worker."""
    made = Neighbour(installation, tmp_path / "neighbour")
    yield made
    made.close()


@pytest.fixture
def perdure(installation: Installation) -> Perdure:
    """Runs `perdure` commands on this installation."""
    return Perdure(installation.environment, installation.directory)


@pytest.fixture
def gateway(perdure: Perdure) -> Iterator[GatewayProcess]:
    """A gateway that the test may kill."""
    made = GatewayProcess(perdure)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def worker_count() -> int:
    """The number of workers that are started for the test."""
    return 2


@pytest.fixture
def celery_broker_cluster(redis_server: RedisContainer) -> Iterator[CeleryBrokerCluster]:
    """The broker: this test's Redis."""
    cluster = CeleryBrokerCluster(RedisBroker(redis_server))
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_backend_cluster(redis_server: RedisContainer) -> Iterator[CeleryBackendCluster]:
    """The result backend: the broker's Redis."""
    cluster = CeleryBackendCluster(RedisBackend(redis_server))
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_worker_cluster(
    installation: Installation, worker_count: int, celery_broker_cluster: CeleryBrokerCluster
) -> Iterator[CeleryWorkerCluster]:
    """The test's worker processes, which are ready to consume."""
    cluster = CeleryWorkerCluster(*[installation.worker() for _ in range(worker_count)])
    assert cluster.ready()
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    """The class of `celery_setup`; its `teardown` closes the Celery application after the test."""
    return Setup


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add the workers' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for installation in item.stash.get(_installations, []):
            for worker in installation.workers:
                report.sections.append((f"log of {worker.name()}", worker.logs()[-_LOG_TAIL:]))
    return report
