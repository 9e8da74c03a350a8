"""The shared Redis client of a kombu channel."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Any

import pytest
from kombu import Connection
from kombu.simple import SimpleQueue

from perdure.workers.pools import IsolatedApp
from perdure.workers.redis_client import share_client

OPTIONS = {"visibility_timeout": 1, "unacked_restore_throttle": 1, "socket_timeout": 5}


def _counted(channel: Any) -> Counter[str]:
    """Count the clients that `channel` makes from now on."""
    counts: Counter[str] = Counter()
    make = channel.Client

    def count(**options: Any) -> Any:
        counts["clients"] += 1
        return make(**options)

    channel.Client = count
    return counts


def test_all_messages_of_a_channel_take_one_client(redis_url: str) -> None:
    """Publishing, receiving, rejecting and acknowledging make no client per message, and leave nothing behind."""
    app = IsolatedApp("test", broker=redis_url, set_as_current=False)
    with app.connection_for_read() as connection:
        queue: Any = connection.SimpleQueue("work")
        counts = _counted(connection.default_channel)
        for number in range(10):
            queue.put(number)
        first = queue.get(timeout=5)
        first.requeue()
        taken = [queue.get(timeout=5) for _ in range(10)]
        assert sorted(message.payload for message in taken) == list(range(10))
        for message in taken:
            message.ack()
        assert counts["clients"] <= 2, "the shared one, and the one that waits for messages"
        client = connection.default_channel.client
        assert [client.exists("unacked"), client.exists("unacked_index"), client.llen("work")] == [0, 0, 0]
    app.close()


def _shared(url: str) -> tuple[Connection, SimpleQueue]:
    connection = Connection(url, transport_options=OPTIONS)
    share_client(connection.default_channel)
    return connection, connection.SimpleQueue("work")


@pytest.mark.long
def test_an_unacknowledged_message_is_delivered_again(redis_url: str) -> None:
    """A consumer that dies with a message is followed by one that gets it after the visibility timeout, once."""
    connection, queue = _shared(redis_url)
    queue.put("submission")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            _, own = _shared(redis_url)
            own.get(timeout=5)
            os.write(write, b"1")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    again = None
    while again is None and time.monotonic() < deadline:
        connection.default_channel.qos.restore_visible()
        again = connection.default_channel.basic_get("work")
        time.sleep(0.1)
    assert again is not None, "restored after the visibility timeout"
    assert again.payload == "submission"
    again.ack()
    connection.default_channel.qos.restore_visible()
    assert connection.default_channel.basic_get("work") is None
    connection.close()


def test_a_channel_whose_connections_were_dropped_works_again(redis_url: str) -> None:
    """After kombu has replaced the channel's pool, commands use the new pool."""
    connection, queue = _shared(redis_url)
    queue.put("first")
    channel: Any = connection.default_channel
    before = channel.pool
    channel._disconnect_pools()
    queue.put("second")
    assert channel.pool is not before
    assert channel._create_client().connection_pool is channel.pool
    assert channel._size("work") == 2
    connection.close()
