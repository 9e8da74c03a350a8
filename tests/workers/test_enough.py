"""Wake-ups for drains are not published while enough wake-ups wait at the broker."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import redis as redis_py

from perdure.assembly import Addresses
from perdure.servers import redis
from perdure.settings import Settings
from perdure.workers.publish.background import BackgroundWaker
from perdure.workers.publish.wake import ENOUGH, CeleryWaker

MORE = ENOUGH + 30


@pytest.fixture
def client(redis_url: str) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(redis.client_url(redis_url)) as client:
        yield client


@pytest.fixture
def where(redis_url: str) -> Addresses:
    return Addresses("postgresql://", redis_url, redis_url)


def _waiting(client: redis_py.Redis) -> int:
    return sum(client.llen(key) for key in ("turns", "turns\x06\x163", "turns\x06\x166", "turns\x06\x169"))


def test_only_enough_wake_ups_wait(settings: Settings, where: Addresses, client: redis_py.Redis) -> None:
    """The messages of all priorities count; one that a worker has taken makes room for the next."""
    waker = CeleryWaker(settings, where)
    assert not waker.has_enough()
    assert all(waker.drain(uuid4(), number % 10) for number in range(MORE))
    assert _waiting(client) == ENOUGH
    assert waker.has_enough()
    client.rpop("turns\x06\x163")
    assert waker.drain(uuid4(), 5)
    assert _waiting(client) == ENOUGH
    waker.close()


def test_a_session_that_needs_its_wake_up_gets_it(settings: Settings, where: Addresses, client: redis_py.Redis) -> None:
    """A session that no drain takes is woken whatever waits at the broker."""
    waker = CeleryWaker(settings, where)
    for _ in range(MORE):
        waker.session(uuid4(), 5)
    assert _waiting(client) == MORE
    waker.close()


def test_the_background_thread_publishes_only_enough(
    settings: Settings, where: Addresses, client: redis_py.Redis
) -> None:
    """The gateway's wake-ups are counted batch by batch; those of other tasks are not held back."""
    waker = BackgroundWaker(settings, where)
    delivery_ids = [uuid4() for _ in range(3)]
    for _ in range(MORE):
        assert waker.drain(uuid4(), 5)
    for each in delivery_ids:
        assert waker.delivery(each)
    waker.close()
    assert _waiting(client) == ENOUGH
    assert client.llen("deliveries\x06\x163") == len(delivery_ids)


def test_a_queue_that_cannot_be_counted_holds_nothing_back(
    settings: Settings, where: Addresses, client: redis_py.Redis
) -> None:
    """If another program uses a key of the queue, the caller learns that nothing was published."""
    client.set("turns\x06\x163", "not a list")
    waker = CeleryWaker(settings, where)
    assert not waker.has_enough()
    assert not waker.drain(uuid4(), 9)
    waker.close()
    background = BackgroundWaker(settings, where)
    background.drain(uuid4(), 9)
    background.delivery(uuid4())
    background.close()
    assert client.llen("deliveries\x06\x163") == 1
