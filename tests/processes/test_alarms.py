"""A RabbitMQ with an alarm for memory or disk reads nothing from publishers, and keeps their connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection, Producer, Queue

from perdure.assembly import Addresses
from perdure.channels.http.api.health import broker_check
from perdure.observe.servers import broker_state
from perdure.settings import Settings
from perdure.tools.awaited.port import TaskCall, TaskSent
from perdure.workers.publish.background import BackgroundWaker
from perdure.workers.publish.calls import CeleryCalls
from perdure.workers.publish.wake import CeleryWaker
from tests.processes.faults import wait_until
from tests.processes.rabbit import Rabbit

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]

ATTEMPTS = 4
QUEUE = "deliveries"
SETTINGS = Settings(_env_file=None)

Publish = Callable[[], bool]
"""Publishes one task to `QUEUE`; returns whether the broker accepted it."""


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rabbit]:
    """A broker of this module, whose alarm a test raises."""
    broker = Rabbit(tmp_path_factory.mktemp("rabbitmq"))
    try:
        broker.start()
        yield broker
    finally:
        broker.close()


@pytest.fixture
def queue(rabbit: Rabbit) -> Iterator[Any]:
    """`QUEUE`, which is empty. The alarm ends with the test."""
    with Connection(rabbit.url) as connection:
        made = Queue(QUEUE)(connection.default_channel)
        made.queue_declare()
        yield made
        rabbit.alarm(on=False)
        made.delete()


@pytest.fixture(params=["wake", "background", "tool"])
def publish(request: pytest.FixtureRequest, rabbit: Rabbit) -> Iterator[Publish]:
    """Each way in which perdure publishes, without the pause after a failure."""
    where = Addresses("postgresql://", "redis://127.0.0.1:1", rabbit.url)
    if request.param == "tool":
        calls = CeleryCalls.at(SETTINGS, where)
        yield lambda: _unpaused(calls).send(_call()) is TaskSent.YES
        calls.close()
        return
    if request.param == "wake":
        waker = CeleryWaker(SETTINGS, where)
        yield lambda: _unpaused(waker).publish("deliveries.send", {}, queue=QUEUE)
        waker.close()
        return
    background = BackgroundWaker(SETTINGS, where)
    wake: Any = ("deliveries.send", {}, {"queue": QUEUE})
    yield lambda: background._publish_batch([wake]) is None
    background.close()


def _call() -> TaskCall:
    task_id = uuid4()
    return TaskCall(task_id, "shop.take", {}, QUEUE, 60, task_id)


def _unpaused(publisher: Any) -> Any:
    publisher._unavailable_until = 0.0
    return publisher


def test_attempts_during_an_alarm_leave_one_connection(rabbit: Rabbit, queue: Any, publish: Publish) -> None:
    """RabbitMQ keeps a blocked connection that its client has left. So the client stays, and writes nothing more."""
    assert publish()
    rabbit.alarm(on=True)
    assert [publish() for _ in range(ATTEMPTS)] == [False] * ATTEMPTS
    assert rabbit.control("list_connections", "state").split().count("blocked") == 1
    rabbit.alarm(on=False)
    wait_until(publish, "the broker accepts tasks again")
    assert publish()
    wait_until(lambda: queue.queue_declare(passive=True).message_count >= 3, "the tasks arrive")
    assert queue.queue_declare(passive=True).message_count <= 4, "the attempts during the alarm sent at most one task"


@pytest.mark.usefixtures("queue")
def test_the_applications_own_tasks_meet_no_error_of_perdure(rabbit: Rabbit) -> None:
    """They may use a connection over which perdure has published. Celery sends them, and RabbitMQ has them later."""
    app = Celery("shop", broker=rabbit.url, set_as_current=False)
    calls = CeleryCalls(app, owned=False)
    assert calls.send(_call()) is TaskSent.YES
    rabbit.alarm(on=True)
    with app.producer_or_acquire() as producer:
        app.send_task("shop.count", queue=QUEUE, producer=producer)
        wait_until(lambda: _is_blocked(producer), "RabbitMQ blocks the connection")
        app.send_task("shop.count", queue=QUEUE, producer=producer)
    assert _unpaused(calls).send(_call()) is TaskSent.NO
    app.close()


def _is_blocked(producer: Producer) -> bool:
    driver = producer.connection.connection
    with suppress(TimeoutError):
        driver.drain_events(timeout=0.1)
    return bool(driver.on_blocked.__self__.is_on)


def test_a_process_that_has_published_during_an_alarm_reports_the_broker(rabbit: Rabbit, queue: Any) -> None:
    """`/readyz` and the metrics of a gateway show that no wake-up is accepted, why, and when the alarm is over."""
    waker = CeleryWaker(SETTINGS, Addresses("postgresql://", "redis://127.0.0.1:1", rabbit.url))
    assert asyncio.run(broker_check(waker.reachable).fault()) is None
    rabbit.alarm(on=True)
    assert not waker.publish("deliveries.send", {}, queue=QUEUE)
    blocked = "RabbitMQ accepts no messages: it has an alarm for memory or disk."
    assert asyncio.run(broker_check(waker.reachable).fault()) == broker_state(waker.reachable).fault == blocked
    rabbit.alarm(on=False)
    wait_until(lambda: broker_state(waker.reachable).fault is None, "the alarm is over")
    assert asyncio.run(broker_check(waker.reachable).fault()) is None
    waker.close()
