"""How a worker's consumer behaves when the broker fails or a queue is full.

A queue is full for a worker if the worker already runs as many tasks of the queue as the queue's limit allows.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_py
from celery import Celery
from celery.exceptions import CPendingDeprecationWarning
from kombu import Connection, Exchange, Queue
from kombu import Consumer as Listener
from kombu.exceptions import OperationalError

from perdure.servers import redis
from perdure.workers.consumer import malformed
from perdure.workers.consumer.consumer import Consumer
from perdure.workers.consumer.room import Rooms


def test_a_waiting_channel_is_closed_completely_after_its_server_died(tmp_path: Path) -> None:
    """If Redis is killed, the consumer closes its channel completely. A later acknowledgement then raises no error."""
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
            connection.drain_events(timeout=0.2)  # a timeout leaves the channel waiting for the next message
        consumer = Consumer.__new__(Consumer)
        consumer.__dict__.update(app=app, connection=connection, task_consumer=listener)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.warns(CPendingDeprecationWarning):
            consumer.on_connection_error_after_connected(ConnectionError("the channel of commands is dead"))
        assert consumer.connection is None
        assert channel.closed
    with redis.start(tmp_path / "redis"):
        taken[0].ack()  # a task that ends after the restart still acknowledges its message


def test_a_worker_is_soon_back_after_a_long_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long the broker was unavailable, the worker tries again within 5 s. kombu's pauses grow to 30 s."""
    monkeypatch.setattr("kombu.utils.functional.sleep", lambda _: None)
    app = Celery("test", broker="redis://127.0.0.1:1", set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True, broker_connection_max_retries=20)
    consumer = Consumer.__new__(Consumer)
    consumer.__dict__.update(app=app, first_connection_attempt=True, broker_connection_retry_attempt=0)
    with pytest.raises(OperationalError, match="refused"):
        consumer.ensure_connected(app.connection_for_read())
    pauses = [float(found) for found in re.findall(r"Trying again in ([\d.]+) seconds", caplog.text)]
    assert (len(pauses), pauses[0], max(pauses)) == (20, 2, 5)


class Broker:
    """A fake `perdure.workers.consumer.room.Tap`. Its event loop runs when the test calls `run_loop`."""

    def __init__(self) -> None:
        self.pending: list[tuple[Callable[[str], None], str]] = []
        self.taking = {"turns", "deliveries"}
        self.returned: list[str] = []
        self.on_cancel: Callable[[], object] = bool

    def soon(self, work: Callable[[str], None], queue: str) -> None:
        """Queue work for the event loop."""
        self.pending.append((work, queue))

    def cancel(self, queue: str) -> None:
        """Stop consuming from the queue, then call `on_cancel`."""
        self.taking.discard(queue)
        self.on_cancel()

    def consume(self, queue: str) -> None:
        """Consume from the queue again."""
        self.taking.add(queue)

    def run_loop(self) -> None:
        """Run the event loop until it has no more work."""
        while self.pending:
            work, queue = self.pending.pop(0)
            work(queue)


class SharedSlots:
    """A fake of kombu's `QoS`. `extra` is the number of prefetch slots that were added."""

    extra = 0

    def increment_eventually(self) -> None:
        """Add a slot."""
        self.extra += 1

    def decrement_eventually(self) -> None:
        """Remove a slot."""
        self.extra -= 1


class Held:
    """A message that arrived while its queue had no room."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def requeue(self) -> None:
        """Return the message to the broker.

        Fails if the worker still consumes the queue, because the worker would then receive the message again.
        """
        assert "turns" not in self._broker.taking
        self._broker.returned.append("turns")


def test_a_full_queue_is_left_to_others_until_a_task_ends() -> None:
    """A worker stops consuming a full queue, and returns to the broker the messages that have already arrived.

    When a task of the queue ends, the worker consumes the queue again.
    """
    broker = Broker()
    rooms = Rooms(2, broker)
    rooms.enter("turns")
    rooms.enter("turns")
    rooms.hold("turns", Held(broker))
    broker.run_loop()
    assert (broker.taking, broker.returned) == ({"deliveries"}, ["turns"])
    rooms.leave("turns")
    broker.run_loop()
    assert broker.taking == {"turns", "deliveries"}


def test_tasks_whose_countdown_passes_wait_for_room() -> None:
    """A task whose countdown has passed waits without a thread while its queue is full.

    When a running task of the queue ends, the next waiting task begins.
    """
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
    broker.run_loop()
    assert (len(began), slots.extra, broker.taking) == (2, 3, {"deliveries"})
    for ended in range(5):
        began[ended].set_result(None)
        broker.run_loop()
        assert len(began) == min(ended + 3, 5)
    assert slots.extra == 0
    assert broker.taking == {"turns", "deliveries"}


@pytest.mark.parametrize("acknowledged", [True, False])
def test_an_error_that_escapes_celery_is_logged(caplog: pytest.LogCaptureFixture, *, acknowledged: bool) -> None:
    """The message of the task is lost if it was acknowledged early, and dropped otherwise. Neither is silent."""
    rejected: list[str] = []
    message = SimpleNamespace(acknowledged=acknowledged, reject_log_error=lambda *_: rejected.append("turns"))
    request: Any = SimpleNamespace(delivery_info={"routing_key": "turns"}, message=message, acknowledged=acknowledged)
    consumer: Any = Consumer.__new__(Consumer)
    consumer.__dict__.update(
        _dropped=malformed.Dropped(), connection_errors=(), call_soon=lambda work, *arguments: work(*arguments)
    )
    ran = Future[Any]()
    ran.set_exception(LookupError("refused"))
    consumer._ended(request, Rooms(1, Broker()), ran)
    assert "queue turns: dropped 1 items that no worker can read: LookupError" in caplog.text
    assert rejected == ([] if acknowledged else ["turns"])


def test_a_task_that_ends_while_its_queue_is_cancelled_reopens_it() -> None:
    """If a task ends while the worker cancels the task's queue, the worker consumes the queue again."""
    broker = Broker()
    rooms = Rooms(1, broker)
    broker.on_cancel = lambda: rooms.leave("turns")
    rooms.enter("turns")
    broker.run_loop()
    assert broker.taking == {"turns", "deliveries"}


def test_a_full_queue_that_is_reopened_is_cancelled_again() -> None:
    """If other code makes a worker consume a full queue again, the worker cancels the queue when a message arrives."""
    broker = Broker()
    rooms = Rooms(1, broker)
    rooms.enter("turns")
    broker.run_loop()
    broker.taking.add("turns")
    rooms.hold("turns", Held(broker))
    broker.run_loop()
    assert (broker.taking, broker.returned) == ({"deliveries"}, ["turns"])


@pytest.mark.long
def test_a_key_prefix_hides_no_malformed_item(redis_url: str) -> None:
    """An application may set kombu's `global_keyprefix`. perdure's queues then have other keys, and the same names."""
    dropped: list[str] = []
    prefixed = {"global_keyprefix": "shop:", "socket_timeout": 5}
    with Connection(redis_url, transport_options=prefixed) as connection:
        channel = connection.default_channel
        malformed.screen_queues(channel, lambda queue, _reason: dropped.append(queue), only={"turns"})
        Listener(channel, [Queue("turns")], callbacks=[lambda *_: None]).consume()
        with redis_py.Redis.from_url(redis.client_url(redis_url)) as client:
            client.lpush("shop:turns", "no JSON")
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=1)
    assert dropped == ["turns"]
