"""The broker priorities of published tasks, and the order in which consumers receive the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection, Consumer, Exchange, Queue

from perdure.assembly import Addresses
from perdure.network.queues import QUEUES
from perdure.settings import Settings
from perdure.workers.celery_application import broker_priority, transport_options
from perdure.workers.publish.wake import CeleryWaker

TURNS_LEVELS = [0, 3, 6, 9]
"""The priority levels that kombu's consumers read by default."""


@pytest.fixture
def waker(settings: Settings, redis_url: str) -> Iterator[CeleryWaker]:
    """A waker that publishes to a Redis without workers."""
    made = CeleryWaker(settings, Addresses("postgresql://", redis_url, redis_url))
    yield made
    made.close()


def _consumed(url: str, number: int, queues: tuple[str, ...], **options: Any) -> list[Any]:
    """The first `number` messages of the queues, in the order in which a consumer receives them."""
    taken: list[Any] = []
    with Connection(url, transport_options=options) as connection:
        declared = [Queue(name, Exchange(name), routing_key=name) for name in queues]
        with Consumer(connection, declared, on_message=taken.append, prefetch_count=1, auto_declare=True):
            while len(taken) < number:
                connection.drain_events(timeout=5)
                taken[-1].ack()
    return taken


def _priority(message: Any) -> int:
    return int(message.properties["priority"])


def test_a_plain_consumer_gets_every_wake_up_in_order(waker: CeleryWaker, redis_url: str) -> None:
    """Ten priorities map to the four levels that kombu reads by default. The most urgent wake-ups come first."""
    for priority in range(10):
        assert waker.session(uuid4(), priority)
    levels = [_priority(message) for message in _consumed(redis_url, 10, ("turns",))]
    assert levels == sorted(levels)
    assert set(levels) == set(TURNS_LEVELS)


def test_other_work_neither_overtakes_turns_nor_comes_last(waker: CeleryWaker, redis_url: str) -> None:
    """Urgent turns are received first, then ordinary turns, deliveries and session ends, then the least urgent work."""
    waker.consolidation(uuid4())
    waker.session(uuid4(), 0)
    for _ in range(3):
        waker.delivery(uuid4())
        waker.ending(uuid4())
    waker.session(uuid4(), 5)
    waker.session(uuid4(), 9)
    waker.publish("turns.submit", {}, queue="ingress")
    order = [message.headers["task"] for message in _consumed(redis_url, 11, QUEUES)]
    assert set(order[:2]) == {"turns.run", "turns.submit"}
    assert set(order[2:6]) == {"turns.run", "deliveries.send", "sessions.end"}, (
        "deliveries and endings run with ordinary turns"
    )
    assert set(order[2:9]) == {"turns.run", "deliveries.send", "sessions.end"}
    assert order[9:] == ["memory.consolidate_session", "turns.run"]


def test_a_worker_reads_all_ten_levels(redis_url: str) -> None:
    """A worker reads all ten levels, because another service may publish with its own `priority_steps`."""
    steps = {"priority_steps": list(range(10))}
    with Connection(redis_url, transport_options=steps) as connection:
        for level in (7, 1, 9, 4, 0, 3, 8, 2, 6, 5):
            connection.Producer().publish({}, routing_key="turns", priority=level, declare=[Queue("turns")])
    options = transport_options(redis_url, 5.0, "perdure:")
    levels = [_priority(message) for message in _consumed(redis_url, 10, ("turns",), **options)]
    assert levels == list(range(10))


def test_on_rabbitmq_nine_is_first_and_the_queue_keeps_its_arguments(settings: Settings) -> None:
    """On RabbitMQ, perdure's priorities are used unchanged. Only the queue `turns` has an `x-max-priority`."""
    broker_url = "amqp://127.0.0.1:1//"
    assert [broker_priority(broker_url, each) for each in range(10)] == list(range(10))
    waker = CeleryWaker(settings, Addresses("postgresql://", "redis://127.0.0.1:1/0", broker_url))
    arguments = {name: queue.queue_arguments for name, queue in waker.app.amqp.queues.items()}
    waker.close()
    assert arguments == {**dict.fromkeys(QUEUES), "turns": {"x-max-priority": 9}}
