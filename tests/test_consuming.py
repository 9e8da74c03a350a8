"""The worker's consumer and a broker that goes away."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import CPendingDeprecationWarning
from kombu import Connection, Exchange, Queue
from kombu import Consumer as Listener

from perdure.embedded import redis
from perdure.workers.consumer.consumer import Consumer
from perdure.workers.consumer.room import Rooms


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


class Broker:
    """A `perdure.workers.consumer.room.Tap` whose event loop runs when the test says so."""

    def __init__(self) -> None:
        self.pending: list[tuple[Callable[[str], None], str]] = []
        self.taking = {"turns", "deliveries"}
        self.returned: list[str] = []
        self.on_cancel: Callable[[], object] = bool

    def soon(self, work: Callable[[str], None], queue: str) -> None:
        """Note what the event loop has to do."""
        self.pending.append((work, queue))

    def cancel(self, queue: str) -> None:
        """Stop taking; something may happen in the meantime."""
        self.taking.discard(queue)
        self.on_cancel()

    def consume(self, queue: str) -> None:
        """Take again."""
        self.taking.add(queue)

    def turn(self) -> None:
        """Run the event loop until it has nothing to do."""
        while self.pending:
            work, queue = self.pending.pop(0)
            work(queue)


class SharedSlots:
    """The prefetch count of a worker: how many slots were added to it."""

    extra = 0

    def increment_eventually(self) -> None:
        """One more."""
        self.extra += 1

    def decrement_eventually(self) -> None:
        """One less."""
        self.extra -= 1


class Held:
    """A message that came without room."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def requeue(self) -> None:
        """Back to the queue: only once that cannot deliver it here again."""
        assert "turns" not in self._broker.taking
        self._broker.returned.append("turns")


def test_a_full_queue_is_left_to_others_until_a_task_ends() -> None:
    """The other queues are taken from; what was on its way goes back after the queue was cancelled."""
    broker = Broker()
    rooms = Rooms(2, broker)
    rooms.enter("turns")
    rooms.enter("turns")
    rooms.hold("turns", Held(broker))
    broker.turn()
    assert (broker.taking, broker.returned) == ({"deliveries"}, ["turns"])
    rooms.leave("turns")
    broker.turn()
    assert broker.taking == {"turns", "deliveries"}


def test_tasks_whose_countdown_passes_wait_for_room() -> None:
    """Many at once do not occupy the threads of other queues, nor the prefetch slots. They begin in their order."""
    broker, slots = Broker(), SharedSlots()
    consumer = Consumer.__new__(Consumer)
    consumer.__dict__.update(rooms=Rooms(2, broker), qos=slots, pool=None)
    began: list[Future[None]] = []
    request = SimpleNamespace(delivery_info={"routing_key": "turns"})

    def execute_using_pool(_: Any) -> Any:
        began.append(Future())
        return SimpleNamespace(f=began[-1])

    request.execute_using_pool = execute_using_pool
    for _ in range(5):
        consumer._begin(request)
    broker.turn()
    assert (len(began), slots.extra, broker.taking) == (2, 3, {"deliveries"})
    for ended in range(5):
        began[ended].set_result(None)
        broker.turn()
        assert len(began) == min(ended + 3, 5)
    assert slots.extra == 0
    assert broker.taking == {"turns", "deliveries"}


def test_a_task_that_ends_while_its_queue_is_cancelled_reopens_it() -> None:
    """Whenever it ends, the worker must not be left without a queue to take from."""
    broker = Broker()
    rooms = Rooms(1, broker)
    broker.on_cancel = lambda: rooms.leave("turns")
    rooms.enter("turns")
    broker.turn()
    assert broker.taking == {"turns", "deliveries"}


def test_a_queue_that_was_selected_again_by_others_is_cancelled_again() -> None:
    """The intake was closed and opened while there was no room: a message must not go round in circles."""
    broker = Broker()
    rooms = Rooms(1, broker)
    rooms.enter("turns")
    broker.turn()
    broker.taking.add("turns")
    rooms.hold("turns", Held(broker))
    broker.turn()
    assert (broker.taking, broker.returned) == ({"deliveries"}, ["turns"])
