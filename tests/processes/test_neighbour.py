"""perdure on a Redis database that another Celery application also uses."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis as redis_py
from celery import Celery
from kombu import Connection, Exchange, Queue

from perdure.assembly import Addresses
from perdure.redis import client_url
from perdure.settings import Settings
from perdure.workers.celery_application import REDELIVER_S, make_app
from perdure.workers.consumer.unknown_tasks import DELAY_S, HELD
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.neighbour import QUEUE
from tests.processes.neighbourhood import Neighbour

UNACKED, INDEX = "unacked", "unacked_index"
"""Kombu's default keys for unacknowledged messages."""

COUNTDOWN_S = 5


@pytest.fixture
def client(installation: Installation) -> Iterator[Any]:
    """A client of the shared Redis."""
    with redis_py.Redis.from_url(client_url(installation.redis.url), decode_responses=True) as made:
        yield made


@pytest.fixture
def operator(installation: Installation) -> Iterator[Celery]:
    """Perdure's own application, as in `celery -A perdure inspect`."""
    url = installation.redis.url
    app = make_app(Settings(_env_file=None), Addresses("postgresql://", url, url))
    yield app
    app.close()


def age(client: Any, index: str) -> None:
    """Make the unacknowledged messages in the sorted set `index` older than perdure's visibility timeout."""
    client.zadd(index, dict.fromkeys(client.zrange(index, 0, -1), time.time() - REDELIVER_S - 1))


def own_keys(operator: Celery) -> dict[str, str]:
    """The transport options that name the keys of perdure's unacknowledged messages."""
    options = operator.conf.broker_transport_options
    return {name: key for name, key in options.items() if name.startswith("unacked_") and name.endswith("key")}


def take(url: str, queue: str, keys: Mapping[str, str]) -> None:
    """Take a message and leave it unacknowledged, as a killed worker does."""
    with Connection(url, transport_options=dict(keys)) as connection:
        channel: Any = connection.channel()
        channel.do_restore = False
        taken: list[Any] = []
        channel.basic_consume(queue, no_ack=False, callback=taken.append, consumer_tag="killed")
        while not taken:
            connection.drain_events(timeout=10)


def submit(app: Celery, text: str) -> str:
    """Send a message to perdure as another service does; returns the task's id."""
    return str(app.send_task("turns.submit", kwargs={"user_id": "ana", "text": text}, queue="ingress").id)


def accepted(installation: Installation, text: str) -> bool:
    """Whether perdure accepted the message."""
    return bool(installation.query("SELECT 1 FROM inbox WHERE text = %(text)s", text=text))


@pytest.mark.exhaustive
def test_the_slow_tasks_of_an_application_run_once(
    installation: Installation, neighbour: Neighbour, client: Any, operator: Celery
) -> None:
    """The application's messages keep their visibility timeout of an hour, although perdure's is a minute."""
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


@pytest.mark.exhaustive
def test_neither_application_sees_the_workers_of_the_other(
    installation: Installation, neighbour: Neighbour, operator: Celery
) -> None:
    """Each application has its own exchanges for control and events, which `inspect`, Flower and gossip use."""
    installation.worker().container.ready()
    neighbour.worker()
    for app, name in ((operator, "worker-1"), (neighbour.app, "neighbour")):
        answers = wait_until(partial(app.control.ping, timeout=1), f"{name} answers")
        assert [host.partition("@")[0] for answer in answers for host in answer] == [name]
    with ThreadPoolExecutor(2) as threads:
        names = list(threads.map(_heartbeats, (operator, neighbour.app)))
    assert names == [{"worker-1"}, {"neighbour"}]


def _heartbeats(app: Celery) -> set[str]:
    """The names of the workers whose heartbeats an event receiver of `app` gets."""
    names: set[str] = set()
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": lambda event: names.add(event["hostname"])})
        receiver.capture(limit=3, timeout=20, wakeup=False)
    return {name.partition("@")[0] for name in names}


@pytest.mark.exhaustive
def test_a_task_in_a_queue_of_the_same_name_waits_for_its_application(
    installation: Installation, neighbour: Neighbour, client: Any
) -> None:
    """Perdure returns unknown tasks to their queues, at a bounded rate, until the tasks' application consumes them."""
    worker = installation.worker()
    worker.container.ready()
    neighbour.app.send_task("neighbour.quick", queue="turns")
    publish_by_topic(neighbour.app, "deliveries")
    starmap = {"task": neighbour.app.signature("neighbour.quick"), "it": [[]]}
    neighbour.app.send_task("celery.starmap", kwargs=starmap, queue="memory")  # perdure's workers have this task, too
    wait_until(lambda: worker.logs().count("perdure has no task for") == 3, "perdure reports the queues")
    (turn,) = installation.settled(installation.accept("hello").turn_id)
    assert turn["status"] == "done"

    first, *_, last = returns(installation.redis.url, "turns", 4)
    assert last - first > 3 * DELAY_S * 0.9
    assert worker.logs().count("perdure has no task for") == 3, "perdure reports each queue once a minute"

    neighbour.worker("-Q", "turns,deliveries,memory")
    wait_until(lambda: neighbour.runs() == {"quick": 3}, "the application runs all three")
    wait_until(
        lambda: not client.exists(UNACKED, "perdure:unacked", "turns", "deliveries", "memory"), "nothing is left to run"
    )
    assert neighbour.runs() == {"quick": 3}


@pytest.mark.exhaustive
def test_a_backlog_of_unknown_tasks_delays_no_other_queue(
    installation: Installation, neighbour: Neighbour, client: Any
) -> None:
    """Turns run at once although one of perdure's queues holds hundreds of the other application's tasks."""
    backlog = 4 * HELD
    installation.worker("--concurrency=4").container.ready()
    with neighbour.app.connection_for_write() as connection, neighbour.app.amqp.Producer(connection) as producer:
        for _ in range(backlog):
            neighbour.app.send_task("neighbour.quick", queue="maintenance", producer=producer)
    wait_until(lambda: client.hlen("perdure:unacked") >= HELD, "perdure holds as many tasks as it may")
    for number in range(3):
        accepted = installation.accept("hello", user=f"user {number}")
        assert installation.settled(accepted.turn_id, within_s=5)[0]["status"] == "done"
    neighbour.worker("-Q", "maintenance")
    wait_until(lambda: neighbour.runs() == {"quick": backlog}, "the application runs all of them")


LEVELS = {0: "maintenance", 4: "maintenance\x06\x163", 5: "maintenance\x06\x163"}
"""By task priority: the Redis list to which a publisher with kombu's defaults pushes a task."""


@pytest.mark.exhaustive
def test_a_worker_returns_a_task_at_a_level_that_its_application_reads(
    installation: Installation, neighbour: Neighbour, client: Any
) -> None:
    """A worker that shuts down returns tasks at priority levels that the application reads: 0, 3, 6 and 9."""
    worker = installation.worker()
    worker.container.ready()
    for priority in LEVELS:
        neighbour.app.send_task("neighbour.quick", queue="maintenance", priority=priority)
    wait_until(lambda: client.hlen("perdure:unacked") == len(LEVELS), "perdure holds the tasks")
    worker.kill("SIGTERM")
    assert worker.container.wait() == 0
    assert {key: client.llen(key) for key in client.scan_iter("maintenance*")} == Counter(LEVELS.values())
    neighbour.worker("-Q", "maintenance")
    wait_until(lambda: neighbour.runs() == {"quick": len(LEVELS)}, "the application runs all of them")


@pytest.mark.long
def test_a_task_that_a_killed_worker_held_is_restored_at_a_level_that_its_application_reads(
    installation: Installation, neighbour: Neighbour, client: Any, operator: Celery
) -> None:
    """After a kill, another worker of perdure restores the tasks at priority levels that the application reads."""
    worker = installation.worker()
    worker.container.ready()
    for priority in LEVELS:
        neighbour.app.send_task("neighbour.quick", queue="maintenance", priority=priority)
    wait_until(lambda: client.hlen("perdure:unacked") == len(LEVELS), "perdure holds the tasks")
    worker.container.kill(signal.SIGKILL)
    age(client, own_keys(operator)["unacked_index_key"])
    installation.worker("-Q", "memory").container.ready()
    wait_until(lambda: not client.exists("perdure:unacked"), "another worker of perdure restores them")
    assert {key: client.llen(key) for key in client.scan_iter("maintenance*")} == Counter(LEVELS.values())


def publish_by_topic(app: Celery, queue: str) -> None:
    """Publish the application's task to a topic exchange to which `queue` is bound."""
    bound = Queue(queue, Exchange("events", type="topic"), routing_key="quick.*")
    with app.connection_for_write() as connection:
        producer = connection.Producer(channel=connection.channel())
        app.send_task("neighbour.quick", exchange="events", routing_key="quick.1", producer=producer, declare=[bound])


def returns(url: str, queue: str, count: int) -> list[float]:
    """The times at which the next `count` messages are pushed to `queue`, in seconds by Redis's clock."""
    times: list[float] = []
    with redis_py.Redis.from_url(client_url(url), socket_timeout=20) as client, client.monitor() as monitor:
        for command in monitor.listen():
            if command["command"].startswith(f"LPUSH {queue} "):
                times.append(command["time"])
            if len(times) == count:
                return times
    raise AssertionError("Redis closed the connection")


@pytest.mark.exhaustive
def test_a_worker_that_stops_returns_unknown_tasks_first(
    installation: Installation, neighbour: Neighbour, client: Any
) -> None:
    """A worker that shuts down returns unknown tasks to their queue before it waits for its running turns."""
    gate = installation.model_server.gate("slow")
    worker = installation.worker(PERDURE_SHUTDOWN__DRAIN_S="60", PERDURE_SHUTDOWN__HARD_EXIT_S="90")
    worker.container.ready()
    accepted = installation.accept("slow")
    gate.wait()
    neighbour.app.send_task("neighbour.quick", queue="deliveries")
    wait_until(lambda: client.hlen("perdure:unacked") == 1, "perdure holds the task")
    worker.container.signal(signal.SIGTERM)
    wait_until(lambda: "1 of 4" in worker.logs(), "the worker has stopped consuming")
    assert (client.llen("deliveries"), client.hlen("perdure:unacked")) == (1, 0)
    assert worker.container.status == "running"
    gate.opened.set()
    installation.settled(accepted.turn_id)
    assert worker.container.wait() == 0


@pytest.mark.long
def test_a_message_held_by_a_killed_worker_returns_to_its_queue(
    installation: Installation, neighbour: Neighbour, client: Any, operator: Celery
) -> None:
    """A message that a killed worker held returns to its queue.

    Kombu would lose the message, because perdure has no binding for the message's exchange.
    """
    worker = installation.worker()
    worker.container.ready()
    publish_by_topic(neighbour.app, "deliveries")
    wait_until(lambda: client.hlen("perdure:unacked") == 1, "perdure holds the task")
    worker.container.kill(signal.SIGKILL)
    age(client, own_keys(operator)["unacked_index_key"])
    installation.worker("-Q", "memory").container.ready()
    wait_until(lambda: client.llen("deliveries") == 1, "another worker of perdure restores it")
    neighbour.worker("-Q", "deliveries")
    wait_until(neighbour.runs, "the application runs it")
    assert neighbour.runs() == {"quick": 1}


@pytest.mark.long
def test_all_keys_of_an_installation_begin_with_its_prefix(
    installation: Installation, neighbour: Neighbour, client: Any
) -> None:
    """Except for bindings and task results, whose keys other programs read, all keys begin with the prefix."""
    installation.worker(PERDURE_REDIS_PREFIX="other:", PERDURE_SNAPSHOTS="redis").container.ready()
    submit(neighbour.app, "hello")
    wait_until(lambda: accepted(installation, "hello"), "the message is accepted")
    wait_until(lambda: client.keys("other:working:*"), "the turn is remembered")
    own = {key for key in client.keys("*") if not key.startswith(("_kombu.binding", "celery-task-meta-"))}
    assert [key for key in own if not key.startswith("other:")] == []
    assert {key.split(":")[1] for key in own} >= {"working", "{breakers}", "snapshot"}
