"""The worker's consumer and a broker that goes away."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import CPendingDeprecationWarning
from kombu import Connection, Exchange, Queue
from kombu import Consumer as Listener

from workers.consuming import Consumer
from workers.embedded import redis


def test_a_channel_that_waits_is_closed_to_the_end_though_its_server_is_gone(tmp_path: Path) -> None:
    """It has a message that nobody acknowledged; beside it is the channel of commands, whose queue goes with it."""
    app = Celery("test", set_as_current=False)
    app.conf.worker_enable_prefetch_count_reduction = False
    with redis.start(tmp_path / "redis") as server:
        connection = Connection(server.url, transport_options={"socket_timeout": 1, "socket_connect_timeout": 1})
        channel: Any = connection.default_channel
        taken: list[Any] = []
        listener = Listener(channel, [Queue("work", Exchange("work"), routing_key="work")], on_message=taken.append)
        listener.consume()
        commands = Queue("mine", Exchange("commands", type="fanout"), auto_delete=True)
        Listener(connection.channel(), [commands], on_message=taken.append).consume()
        connection.Producer().publish("a task", exchange="work", routing_key="work")
        while not taken:
            connection.drain_events(timeout=5)
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)  # whatever comes of it: it waits for the next message
        consumer = Consumer.__new__(Consumer)
        consumer.__dict__.update(app=app, connection=connection, task_consumer=listener)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.warns(CPendingDeprecationWarning):
            consumer.on_connection_error_after_connected(ConnectionError("the channel of commands is dead"))
        assert consumer.connection is None
        assert channel.closed
    with redis.start(tmp_path / "redis"):
        taken[0].ack()  # by a task that ends now
