"""perdure in a Redis that other programs also use.

These tests run in one process. `tests/processes/test_neighbour.py` runs several processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py
from kombu import Connection
from kombu.asynchronous.timer import Timer
from kombu.common import QoS

from perdure.access.tenants import UserKey
from perdure.clock import SystemClock
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import StreamEvent, StreamEventKind
from perdure.redis import client_url
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings, MemorySettings
from perdure.workers.celery_application import transport_options
from perdure.workers.consumer.unknown_tasks import HELD, UnknownTasks

PREFETCHED = 10


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    """A client of the shared Redis."""
    with redis_py.Redis.from_url(client_url(redis_url), decode_responses=True) as made:
        yield made


class UserTable:
    """A fake consumer of a queue whose tasks are all unknown. Its event loop runs when the test calls `run_loop`."""

    def __init__(self, channel: Any, queue: str) -> None:
        self.timer = Timer()
        self.qos = QoS(lambda prefetch_count: channel.basic_qos(0, prefetch_count, False), PREFETCHED)
        self.unknown = UnknownTasks(self)
        self._takes = False
        self._channel = channel
        self._pending: list[tuple[Any, str]] = []
        self.consume(queue)

    def soon(self, work: Any, queue: str) -> None:
        """Queue work for the event loop."""
        self._pending.append((work, queue))

    def cancel(self, queue: str) -> None:
        """Stop consuming."""
        self._channel.basic_cancel(queue)
        self._takes = False

    def consume(self, queue: str) -> None:
        """Consume from the queue."""
        self._channel.basic_consume(queue, False, lambda message: self.unknown.hold(message, queue, "it"), queue)
        self._takes = True

    def takes(self) -> bool:
        """Whether this consumer consumes the queue."""
        return self._takes

    def run_loop(self) -> None:
        """Run the queued work, and apply the changed prefetch count."""
        while self._pending:
            work, queue = self._pending.pop()
            work(queue)
        self.qos.update()


def test_a_backlog_of_unknown_messages_is_held_a_hundred_at_a_time(redis_url: str, client: Any) -> None:
    """A consumer that holds `HELD` messages of a queue cancels the queue. Held messages use no prefetch slot.

    After the consumer has returned all held messages, it consumes the queue again.
    """
    options = transport_options(redis_url, 5, "perdure:")
    with Connection(redis_url, transport_options=options) as connection:
        producer, channel = connection.Producer(), connection.channel()
        for _ in range(HELD + 2 * PREFETCHED):
            producer.publish({}, routing_key="turns", exchange="")
        holding = UserTable(channel, "turns")
        while holding.takes():
            connection.drain_events(timeout=10)
            holding.run_loop()
        assert client.hlen("perdure:unacked") == HELD
        assert holding.qos.value == PREFETCHED + HELD
        waiting = sorted(holding.timer.queue)
        for number, each in enumerate(waiting, 1):
            each.entry()
            assert holding.takes() == (number == HELD)
        assert holding.qos.value == PREFETCHED
        assert client.llen("turns") == HELD + 2 * PREFETCHED
        while holding.takes():
            connection.drain_events(timeout=10)
            holding.run_loop()
        holding.unknown.release_all()
        assert client.llen("turns") == HELD + 2 * PREFETCHED
        assert not client.exists("perdure:unacked", "perdure:unacked_index")


def test_installations_with_different_prefixes_share_no_keys(redis_url: str, client: Any) -> None:
    """Two installations with different prefixes share no stream, session or breaker."""
    session_id, clock = uuid4(), SystemClock()
    layers = {prefix: RedisMemory.at(redis_url, MemorySettings(), clock, prefix) for prefix in ("a:", "b:")}
    breakers = {
        prefix: Breakers(BreakerSettings(failure_threshold=1), clock, redis_url, prefix=prefix) for prefix in layers
    }
    layers["a:"].stream.append(UserKey("ana"), StreamEvent(StreamEventKind.TYPING, "cli", datetime.now(UTC)))
    client.rpush(f"a:working:{session_id}", "damaged")
    breakers["a:"].get("llm:test").execute(lambda: "fine", 5)

    assert layers["b:"].stream.recent(UserKey("ana"), 10) == []
    assert layers["b:"].working.read(session_id) == ()
    assert [each.name for each in breakers["a:"].list()] == ["llm:test"]
    assert breakers["b:"].list() == []
    assert all(key.startswith("a:") for key in client.keys("*"))
    for prefix, redis_memory in layers.items():
        redis_memory.close()
        breakers[prefix].close()
