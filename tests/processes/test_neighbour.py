"""perdure on a Redis database that another Celery application uses, too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from celery import Celery
from kombu import Connection

from perdure.redis import client_url
from perdure.settings import Settings
from tests.processes.installation import Installation
from tests.processes.neighbour import QUEUE
from tests.processes.nodes import Worker, WorkerContainer
from tests.processes.scene import wait_until
from workers.application import REDELIVER_S, make_app
from workers.assembly import Addresses

UNACKED, INDEX = "unacked", "unacked_index"
"""Kombu's default keys."""

COUNTDOWN_S = 5


class Neighbour:
    """The other application: its worker, and a program that publishes its tasks."""

    def __init__(self, installation: Installation, directory: Path) -> None:
        self.directory = directory
        self.app = Celery("a program of the neighbour", broker=installation.redis.url, set_as_current=False)
        self.app.conf.update(task_default_queue=QUEUE)
        self._installation = installation

    def worker(self, *options: str) -> Worker:
        """Start a worker of the application."""
        url = self._installation.redis.url
        environment = {
            **{name: value for name, value in self._installation.environment.items() if "PERDURE" not in name},
            "NEIGHBOUR_REDIS_URL": url,
            "NEIGHBOUR_DIRECTORY": str(self.directory),
        }
        container = WorkerContainer("neighbour", environment, self.directory, options, "tests.processes.neighbour")
        self._installation.workers.append(Worker(container, app=None))
        container.start()
        container.ready()
        return self._installation.workers[-1]

    def runs(self) -> Counter[str]:
        """How often each task ran."""
        path = self.directory / "runs"
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def open_gate(self) -> None:
        """Let the slow task end."""
        (self.directory / "gate").touch()


@pytest.fixture
def neighbour(installation: Installation, tmp_path: Path) -> Iterator[Neighbour]:
    """The other application, without a worker as yet."""
    directory = tmp_path / "neighbour"
    directory.mkdir()
    made = Neighbour(installation, directory)
    yield made
    made.open_gate()
    made.app.close()


@pytest.fixture
def client(installation: Installation) -> Iterator[Any]:
    """The shared Redis."""
    with redis_py.Redis.from_url(client_url(installation.redis.url), decode_responses=True) as made:
        yield made


@pytest.fixture
def operator(installation: Installation) -> Iterator[Celery]:
    """Perdure's own application, as `celery -A workers inspect` has it."""
    url = installation.redis.url
    app = make_app(Settings(_env_file=None), Addresses("postgresql://", url, url))
    yield app
    app.close()


def age(client: Any, index: str) -> None:
    """Have the unacknowledged messages of `index` be older than perdure's visibility timeout."""
    client.zadd(index, dict.fromkeys(client.zrange(index, 0, -1), time.time() - REDELIVER_S - 1))


def own_keys(operator: Celery) -> dict[str, str]:
    """The names of the keys where perdure's workers keep what they have not acknowledged."""
    options = operator.conf.broker_transport_options
    return {name: key for name, key in options.items() if name.startswith("unacked_") and name.endswith("key")}


def take(url: str, queue: str, keys: Mapping[str, str]) -> None:
    """Take a message as a worker does that is killed before it acknowledges."""
    with Connection(url, transport_options=dict(keys)) as connection:
        channel: Any = connection.channel()
        channel.do_restore = False
        taken: list[Any] = []
        channel.basic_consume(queue, no_ack=False, callback=taken.append, consumer_tag="killed")
        while not taken:
            connection.drain_events(timeout=10)


def submit(app: Celery, text: str) -> str:
    """Send a message to perdure as another service does; the task's id."""
    return str(app.send_task("turns.submit", kwargs={"user_id": "ana", "text": text}, queue="ingress").id)


def accepted(installation: Installation, text: str) -> bool:
    """Whether perdure accepted the message."""
    return bool(installation.query("SELECT 1 FROM inbox WHERE text = %(text)s", text=text))


def test_the_slow_tasks_of_an_application_run_once(
    installation: Installation, neighbour: Neighbour, client: Any, operator: Celery
) -> None:
    """The visibility timeout of perdure, a minute, concerns perdure's messages only; the application's is an hour."""
    installation.worker("-Q", "turns").container.ready()
    neighbour.worker()
    neighbour.app.send_task("neighbour.late")
    neighbour.app.send_task("neighbour.quick", countdown=COUNTDOWN_S)
    wait_until(lambda: client.hlen(UNACKED) == 2, "the application holds both tasks")
    submit(neighbour.app, "hello")
    keys = own_keys(operator)
    take(installation.redis.url, "ingress", keys)
    age(client, INDEX)
    age(client, keys.get("unacked_index_key", INDEX))

    wait_until(lambda: client.llen("ingress") == 1, "perdure restores its own message")
    neighbour.open_gate()
    wait_until(lambda: neighbour.runs().keys() == {"late", "quick"}, "both tasks ran")
    wait_until(lambda: not client.exists(UNACKED, QUEUE), "nothing is left to run")
    assert neighbour.runs() == {"late": 1, "quick": 1}
