"""Tests of perdure installed in another Celery application. The tests kill and shut down real workers."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import redis as redis_py
from celery import Celery

from perdure.application.install import install
from perdure.servers.redis import client_url
from tests.processes.faults import done, wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to
from tests.processes.neighbourhood import Neighbour
from tests.processes.nodes import Worker, WorkerContainer
from tests.processes.shop import PERDURES, QUEUE
from tests.processes.test_malformed import survives_malformed_items

AT_ONCE_S = 10.0

CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"


class Shop:
    """A Celery application with perdure installed: starts its workers, and publishes tasks through `app`."""

    def __init__(self, installation: Installation, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.app = Celery("shop", broker=installation.environment["PERDURE_BROKER_URL"], set_as_current=False)
        install(self.app)
        self.app.conf.update(task_default_queue=QUEUE, task_queue_max_priority=10)
        self._installation = installation

    def worker(self, *options: str, **settings: str) -> Worker:
        """Start a worker of the application, with additional environment variables."""
        name = f"shop-{len(self._installation.workers) + 1}"
        environment = {
            **self._installation.environment,
            "C_FORCE_ROOT": "1",  # otherwise Celery refuses to run as root with pickle
            "NEIGHBOUR_REDIS_URL": self._installation.environment["PERDURE_BROKER_URL"],
            "NEIGHBOUR_DIRECTORY": str(self.directory),
            **settings,
        }
        del environment["PERDURE_BROKER_URL"]  # perdure uses the application's broker
        container = WorkerContainer(name, environment, self.directory, options, "tests.processes.shop")
        self._installation.workers.append(Worker(container, app=None))
        container.start()
        return self._installation.workers[-1]

    def perdures(self, **settings: str) -> Worker:
        """Start a worker that consumes perdure's queues and the application's queues."""
        made = self.worker("-P", "threads", "-c", "8", "-Q", f"{QUEUE},{PERDURES}", **settings)
        made.container.ready()
        return made

    def runs(self) -> Counter[str]:
        """How often each task ran."""
        path = self.directory / "runs"
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def open_gate(self) -> None:
        """Let the slow task end."""
        (self.directory / "gate").touch()


@pytest.fixture(name="shop")
def opened_shop(installation: Installation, tmp_path: Path) -> Iterator[Shop]:
    """The application, without a worker."""
    made = Shop(installation, tmp_path / "shop")
    yield made
    made.open_gate()
    made.app.close()


def test_an_applications_worker_runs_its_tasks_and_turns(installation: Installation, shop: Shop) -> None:
    """One worker runs the application's tasks and perdure's turns. The application's settings do not affect turns."""
    shop.perdures()
    shop.app.send_task("turns.submit", kwargs={"user_id": "ana", "text": "hello"})
    for name in ("shop.quick", "sessions.expired_carts"):
        shop.app.send_task(name)
    (row,) = wait_until(lambda: installation.query("SELECT turn_id FROM turns"), "the message is accepted")
    (turn,) = installation.settled(row.turn_id, within_s=AT_ONCE_S)
    assert turn["reply"]["text"] == answer_to("hello")
    wait_until(lambda: shop.runs() == {"quick": 1, "expired-carts": 1}, "its own tasks run")
    installation.check()


@pytest.mark.parametrize("accepted", ["pickle", "yaml"])
def test_an_application_need_not_accept_json(installation: Installation, shop: Shop, accepted: str) -> None:
    """The tasks of perdure run though the application accepts no JSON: those acknowledged early and late.

    Celery refuses the application's own task in JSON. The refusal is logged.
    """
    worker = shop.perdures(SHOP_ACCEPTS=accepted)
    shop.app.send_task("turns.submit", kwargs={"user_id": "ana", "text": "hello"})
    (row,) = wait_until(lambda: installation.query("SELECT turn_id FROM turns"), "the message is accepted")
    (turn,) = installation.settled(row.turn_id, within_s=AT_ONCE_S)
    assert turn["reply"]["text"] == answer_to("hello")
    assert "dropped" not in worker.logs()
    shop.app.send_task("shop.quick", serializer="json")
    wait_until(lambda: f"queue {QUEUE}: dropped 1 items" in worker.logs(), "the refusal is logged")
    installation.check()


@pytest.mark.exhaustive
def test_a_malformed_item_does_not_end_the_applications_worker(installation: Installation, shop: Shop) -> None:
    """An application's worker drops malformed items in perdure's queues, as perdure's own workers do."""
    worker = shop.perdures()
    with redis_py.Redis.from_url(client_url(installation.redis.url)) as client:
        survives_malformed_items(installation, worker, client, "unacked")
    shop.app.send_task("shop.quick")
    wait_until(lambda: shop.runs() == {"quick": 1}, "its own tasks run")
    installation.check()


@pytest.mark.long
def test_an_applications_task_is_a_tool_of_its_agent(installation: Installation, shop: Shop) -> None:
    """An agent's tool can be a task of the application, even if the application has no result backend."""
    shop.perdures()
    text = "report: a"
    (turn,) = installation.settled(installation.accept(text).turn_id, within_s=AT_ONCE_S)
    assert turn["reply"]["text"] == answer_to(text, done("report", text))
    assert shop.runs() == {"report": 1}
    installation.check()


@pytest.mark.long
def test_a_shutdown_parks_turns_and_finishes_the_applications_tasks(installation: Installation, shop: Shop) -> None:
    """A worker that shuts down finishes the application's task. Another worker continues the parked turn at once."""
    leaving = shop.perdures()
    gate = installation.model_server.gate("hello")
    shop.app.send_task("shop.slow")
    wait_until(lambda: shop.runs() == {"slow": 1}, "its own task runs")
    accepted = installation.accept("hello")
    gate.wait()
    shop.perdures()

    leaving.container.signal(signal.SIGTERM)
    (turn,) = installation.settled(accepted.turn_id, within_s=AT_ONCE_S)
    assert turn["reply"]["text"] == answer_to("hello")
    assert leaving.container.status == "running"
    shop.open_gate()
    assert leaving.container.wait() == 0
    assert shop.runs() == {"slow": 1, "slow-ended": 1}
    assert "shutdown, 4 of 4" in leaving.logs()
    assert installation.query("SELECT strikes FROM sessions")[0].strikes == 0
    installation.check()


@pytest.mark.long
def test_a_task_of_the_application_may_outlast_the_hard_limit(installation: Installation, shop: Shop) -> None:
    """A worker waits beyond the hard limit for the application's task.

    The task acknowledges its message late. If the worker killed the task, the task would run a second time.
    """
    installation.environment["PERDURE_SHUTDOWN__HARD_EXIT_S"] = "1.5"
    leaving = shop.perdures()
    shop.app.send_task("shop.slow")
    wait_until(lambda: shop.runs() == {"slow": 1}, "its own task runs")
    leaving.container.signal(signal.SIGTERM)
    wait_until(lambda: "waits for 1 tasks of the application" in leaving.logs(), "the limit has passed")
    shop.open_gate()
    assert leaving.container.wait() == 0
    assert shop.runs() == {"slow": 1, "slow-ended": 1}


@pytest.mark.exhaustive
def test_another_worker_continues_a_killed_workers_turn(installation: Installation, shop: Shop) -> None:
    """Another worker continues the turn after the lease has expired and a sweep has woken the session."""
    victim = shop.perdures()
    gate = installation.model_server.gate("hello")
    accepted = installation.accept("hello")
    gate.wait()
    shop.perdures()
    victim.kill("SIGKILL")
    gate.opened.set()
    (turn,) = installation.settled(accepted.turn_id, within_s=AT_ONCE_S)
    assert turn["reply"]["text"] == answer_to("hello")
    installation.check()


@pytest.mark.long
def test_a_prefork_worker_of_the_applications_queues_is_unaffected(installation: Installation, shop: Shop) -> None:
    """Without perdure's queues, a prefork worker starts no watchdog and opens no connection to perdure's database."""
    before = installation.query(CONNECTIONS)
    worker = shop.worker("-c", "1")
    worker.container.ready()
    shop.app.send_task("shop.quick")
    wait_until(lambda: shop.runs() == {"quick": 1}, "its own task runs")
    processes = psutil.Process(worker.pid).children(recursive=True)
    assert installation.query(CONNECTIONS) == before
    assert "perdure" not in worker.logs().partition("[tasks]")[2].partition("[config]")[0]
    assert all("watchdog" not in " ".join(process.cmdline()) for process in processes)
    worker.container.signal(signal.SIGTERM)
    assert worker.container.wait() == 0


THEIRS = ("users", "sessions", "messages", "alembic_version")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("minutes", "long_s", "countdown_s"),
    [
        pytest.param(0.1, 3.0, 4.0, marks=pytest.mark.long),
        pytest.param(10.0, 110.0, 150.0, marks=[pytest.mark.chaos, pytest.mark.timeout(0)]),
    ],
)
def test_an_unrelated_application_shares_the_servers(  # noqa: PLR0917 (fixtures, given by name)
    installation: Installation,
    shop: Shop,
    neighbour: Neighbour,
    minutes: float,
    long_s: float,
    countdown_s: float,
) -> None:
    """An unrelated application on the same servers keeps its tables, and each of its tasks runs once."""
    tables = [f"public.{name}" for name in THEIRS]
    with installation.database.engine.begin() as connection:
        for table in tables:
            connection.exec_driver_sql(f"CREATE TABLE {table} AS SELECT 'theirs' AS value")
    neighbour.worker("-c", "20")
    workers = [shop.perdures(), installation.worker()]
    sent: Counter[str] = Counter()
    send_at = 0.0
    turns: list[UUID] = []
    ends = time.monotonic() + minutes * 60
    for number in count():
        if time.monotonic() >= send_at:
            sent.update(neighbour.send_timed(5, long_s, countdown_s))
            send_at = time.monotonic() + long_s
        turns.append(installation.accept("pure: hello", user=f"user {number % 7}").turn_id)
        if number % 100 == 30:
            workers[number // 100 % 2].kill("SIGKILL")
            workers[number // 100 % 2].container.start()
        if time.monotonic() > ends:
            break
        installation.settled(turns[-1], within_s=60)
    installation.settled(*turns, within_s=60)
    wait_until(lambda: neighbour.runs().total() >= sent.total(), "its tasks have run", long_s + countdown_s + 20)
    assert neighbour.runs() == sent
    assert [installation.query(f"SELECT value FROM {table}") for table in tables] == [[("theirs",)]] * len(tables)  # noqa: S608 (names of this file)
    installation.check()


def test_a_prefork_worker_of_perdures_queues_is_refused(installation: Installation, shop: Shop) -> None:
    """A prefork worker that consumes perdure's queues logs which option to change, and exits with status 2."""
    worker = shop.worker("-Q", "turns")
    assert worker.container.wait() == 2
    assert "start the worker with `-P threads`" in worker.logs()
