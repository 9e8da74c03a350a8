"""A worker's consumer: Celery's consumer, with a limit on the concurrent tasks of each queue.

- It survives the loss of Redis, and Redis keys of a wrong type (`perdure.workers.consumer.broken_keys`).
- It consumes a queue only while it can start a task of that queue at once (`perdure.workers.consumer.room`).
- It returns messages of other applications to their queue (`perdure.workers.consumer.unknown_tasks`).
- It drops malformed messages (`perdure.workers.consumer.malformed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from celery.concurrency.thread import TaskPool
from celery.exceptions import TaskRevokedError
from celery.worker import consumer
from kombu.transport import redis, virtual

from perdure.errors import loggable
from perdure.workers.celery_application import restored_level
from perdure.workers.consumer import broken_keys, malformed, tally
from perdure.workers.consumer.room import Rooms
from perdure.workers.consumer.unknown_tasks import UnknownTasks
from perdure.workers.redis_client import share_client

log = logging.getLogger(__name__)

_BUILT_IN = "celery."
"""The prefix of Celery's built-in tasks. perdure does not publish such tasks. In a queue that perdure shares with
another application, they belong to that application."""

_AHEAD = 8
"""On RabbitMQ, the prefetch count is the limit of `ingress` plus this number. The number is high enough to save round
trips, and low enough that few messages return to the broker when a queue has no room."""

_RECONNECT_S = 5.0
"""The longest pause between two attempts to reach the broker. `/readyz` is 200 as soon as the broker is back, and a
message should not wait for a worker that tries again half a minute later."""


class Consumer(consumer.Consumer):  # type: ignore[misc]  # celery carries no types
    """Celery's consumer, with these changes.

    - Each queue has its own limit on concurrent tasks.
    - A message of another application returns to its queue after a pause. Celery would discard the message.
    - A malformed item is dropped. Celery would exit, or log the item in full.
    - The channel of a lost connection is closed completely. Celery would leave it half closed.
    - A Redis key of a wrong type affects at most its own queue. Celery would exit.
    """

    rooms: Rooms | None = None
    """Limits the concurrent tasks of each queue. `None` for a pool other than `threads`, which has no such limits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._unknown = UnknownTasks(self)
        self._dropped = malformed.Dropped()
        self._current_queue = ""
        super().__init__(*args, **options)
        self._keys = broken_keys.BrokenKeys(self.app)
        if not isinstance(self.pool, TaskPool):
            return
        rooms = self.rooms = Rooms(self.pool.limit, self)
        threads = sum(rooms.of(queue) for queue in self.app.amqp.queues.consume_from)
        self.pool.executor = ThreadPoolExecutor(max_workers=threads)
        self._ahead = threads
        if self.conninfo.transport.driver_type == "amqp":
            self._ahead = rooms.of("ingress") + _AHEAD  # a submission stays unacknowledged until its task ends
        self.initial_prefetch_count = self._ahead
        self.on_task_request = self._begin

    @property
    def max_prefetch_count(self) -> int:
        return self._ahead if self.rooms is not None else super().max_prefetch_count

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Wrap Celery's message handler, to drop malformed messages and to hold messages of a queue without room."""
        handle: Callable[[Any], Any] = super().create_task_handler(*args, **options)

        def receive(message: Any) -> Any:
            queue, rooms = message.delivery_info["routing_key"], self.rooms
            if rooms is not None and queue in self.app.amqp.queues and not rooms.has_room(queue):
                return rooms.hold(queue, message)
            try:
                return handle(message)
            except malformed.UNREADABLE as error:
                return self._drop(message, malformed.reason(error))

        return receive

    def soon(self, work: Callable[[str], None], queue: str) -> None:
        self.call_soon(work, queue)

    def cancel(self, queue: str) -> None:
        if self.task_consumer is not None:
            self.task_consumer.cancel_by_queue(queue)

    def consume(self, queue: str) -> None:
        """Consume a queue again.

        Does nothing if the worker is stopping, the queue is deselected (because the intake is closed), the queue has no
        room, or the worker holds too many messages of the queue. The code that ends such a state calls this again.
        """
        tasks, queues = self.task_consumer, self.app.amqp.queues
        if tasks is None or queue not in queues.consume_from or tasks.consuming_from(queue):
            return
        if self._unknown.is_full(queue) or (self.rooms is not None and self.rooms.is_cancelled(queue)):
            return
        declares, tasks.auto_declare = tasks.auto_declare, False  # the queue was declared when the worker connected
        try:
            tasks.add_queue(queues[queue])
        finally:
            tasks.auto_declare = declares
        tasks.consume()
        self._end_wait(tasks.channel)

    def _end_wait(self, channel: Any) -> None:
        """Make Redis answer the pending BRPOP now, so that the next BRPOP includes the queue that was added.

        Otherwise kombu sends the next BRPOP up to a second later, when Redis answers the pending one. With a shorter
        timeout of BRPOP, every idle worker would send 10 to 20 commands a second. CLIENT UNBLOCK, sent on another
        connection, has no effect if BRPOP already has a message. The server may refuse the command (by an access list),
        or send no client id (with RESP2). Then the worker reads the added queue up to a second later.
        """
        if not isinstance(channel, redis.Channel):
            return
        waiting: Any = channel._in_poll  # noqa: SLF001 (kombu has no public way)
        if not waiting or (client_id := (waiting.handshake_metadata or {}).get(b"id")) is None:
            return
        with channel.conn_or_acquire() as client:
            try:
                client.client_unblock(client_id)
            except channel.ResponseError as error:
                log.debug("Redis refuses CLIENT UNBLOCK: %s", loggable(error))

    def _begin(self, request: Any) -> None:
        """Run a task in the pool as soon as its queue has room, and count it until it has ended.

        While a task waits for room, the prefetch count is higher by one. So the waiting task's message does not reduce
        the number of other messages that the broker sends.
        """
        rooms: Any = self.rooms
        waited = False

        def start() -> None:
            if waited:
                self.qos.decrement_eventually()
            self._run(request, rooms)

        if not rooms.begin(request.delivery_info["routing_key"], start):
            waited = True
            self.qos.increment_eventually()

    def _run(self, request: Any, rooms: Rooms) -> None:
        queue = request.delivery_info["routing_key"]
        try:
            result = request.execute_using_pool(self.pool)
        except TaskRevokedError:
            rooms.leave(queue)
        except malformed.UNREADABLE as error:
            rooms.leave(queue)
            self._drop(request.message, malformed.reason(error), queue)
        except BaseException:
            rooms.leave(queue)
            raise
        else:
            result.f.add_done_callback(lambda ran: self._ended(request, rooms, ran))

    def _ended(self, request: Any, rooms: Rooms, ran: Future[Any]) -> None:
        """Free the task's place. If an error escaped Celery's handling, drop the message, which no worker can finish.

        Celery itself would leave such a message unacknowledged for ever, or lose an acknowledged one without a line in
        the log.
        """
        queue = request.delivery_info["routing_key"]
        rooms.leave(queue)
        if not ran.cancelled() and (error := ran.exception()) is not None:
            self.call_soon(self._drop, request.message, malformed.reason(error), queue)

    def connection_for_read(self, heartbeat: float | None = None) -> Any:
        """Connect. On Redis, also prepare the channel before kombu restores messages on it.

        The preparation makes restored messages return to priority levels that every consumer of the queue reads. It
        renames broken keys, and makes the channel skip each queue with a key that another program uses. In another
        Celery application, whose connections are Celery's own, the channel also gets its one client here.
        """
        connection = super().connection_for_read(heartbeat=heartbeat)
        if isinstance(connection.transport, redis.Transport):
            share_client(connection.default_channel)
            _restore_at_common_levels(connection.default_channel)
            self._keys.skip_taken(connection.default_channel)
            self._check_keys(connection.default_channel)
        return connection

    def register_with_event_loop(self, hub: Any) -> None:
        """Make the event loop check the broker's keys and log the counts of dropped items, at intervals."""
        super().register_with_event_loop(hub)
        hub.call_repeatedly(tally.REPORT_S, self._dropped.report)
        channel = self.task_consumer.channel
        if isinstance(channel, redis.Channel):
            hub.call_repeatedly(broken_keys.CHECK_S, self._check_keys, channel)

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, and try again at least every `_RECONNECT_S` seconds. kombu's own pauses grow to 30 s."""
        conn.ensure_connection = partial(conn.ensure_connection, interval_max=_RECONNECT_S)
        return super().ensure_connected(conn)

    def _check_keys(self, channel: Any) -> list[str]:
        """Rename broken keys, and consume only queues whose keys no other program uses; returns the former names."""
        before = self._keys.taken
        renamed = self._keys.check(channel)
        if self._keys.taken != before:
            channel._update_queue_cycle()  # noqa: SLF001 (kombu has no public way)
            self._end_wait(channel)
        return renamed

    def connect(self) -> Any:
        """Connect, and record each message's queue when it is delivered: the message itself does not name its queue."""
        connection = super().connect()
        if isinstance(connection.transport, virtual.Transport):
            self._track_queues(connection.transport, connection.default_channel)
        if isinstance(connection.transport, redis.Transport):
            self._record_as_sent_by_name(connection.default_channel)
            malformed.screen(connection.transport, connection.default_channel, self._dropped.note)
        return connection

    def _track_queues(self, transport: Any, channel: Any) -> None:
        deliver = transport._deliver  # noqa: SLF001 (kombu passes the queue's name only here)

        def note_and_deliver(message: Any, queue: str) -> None:
            if (wrong := malformed.fault(message, channel)) is not None:
                self._dropped.note(queue, wrong)
                return
            self._current_queue = queue
            deliver(message, queue)

        transport._deliver = note_and_deliver  # noqa: SLF001 (as above)

    def _record_as_sent_by_name(self, channel: Any) -> None:
        """Record each unacknowledged message as sent directly to its queue, so that kombu restores it there.

        Otherwise kombu would publish a restored message to the message's exchange. Every queue that is bound to the
        exchange would get the message. If this process has not declared the exchange, no queue would get it.

        Redis has already popped the message, so a message without a record would be lost. If a broken key prevents the
        record, this renames the key and records the message again.
        """
        append = channel.qos.append

        def append_as_sent_by_name(message: Any, delivery_tag: str) -> None:
            published = message.delivery_info
            message.delivery_info = {"exchange": "", "routing_key": self._current_queue}
            try:
                append(message, delivery_tag)
            except channel.ResponseError:
                if not self._check_keys(channel):
                    raise
                append(message, delivery_tag)
            finally:
                message.delivery_info = published

        channel.qos.append = append_as_sent_by_name

    def update_strategies(self) -> None:
        """Build the strategies of perdure's tasks, without those of Celery's built-in tasks."""
        super().update_strategies()
        for name in [name for name in self.strategies if name.startswith(_BUILT_IN)]:
            del self.strategies[name]

    def on_unknown_task(self, body: Any, message: Any, exc: BaseException) -> None:  # noqa: ARG002 (Celery's signature)
        """Return the task of another application to its queue after a pause."""
        self._return(message, f"the task {exc.args[0]!r}")

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002 (Celery's signature)
        """Return a message that is not a task to its queue after a pause."""
        self._return(message, "a message that is not a task")

    def on_decode_error(self, message: Any, exc: BaseException) -> None:
        """Drop a task of perdure, or a remote-control command, whose body cannot be decoded.

        Any other message is returned to its queue: another application may use content types that perdure does not
        accept.
        """
        task = message.headers.get("task") if isinstance(message.headers, Mapping) else None
        is_ours = isinstance(task, str) and task in self.strategies
        if is_ours or self._queue_of(message) not in self.app.amqp.queues:
            self._drop(message, malformed.reason(exc))
        else:
            self._return(message, "a message that cannot be decoded")

    def on_invalid_task(self, body: Any, message: Any, exc: BaseException) -> None:  # noqa: ARG002 (Celery's signature)
        """Drop a task with invalid headers, an invalid body or a content type that is not accepted."""
        self._drop(message, malformed.reason(exc))

    def on_close(self) -> None:
        """Log the counts of dropped items. Return the held messages, or forget them if the connection is lost."""
        self._dropped.report()
        if self.connection is None:
            self._unknown.forget()
        else:
            self._unknown.release_all()
        super().on_close()

    def _return(self, message: Any, what: str) -> None:
        self._unknown.hold(message, self._queue_of(message), what)

    def _drop(self, message: Any, reason: str, queue: str = "") -> None:
        self._dropped.note(queue or self._queue_of(message), reason)
        if not message.acknowledged:
            message.reject_log_error(log, self.connection_errors)

    def _queue_of(self, message: Any) -> str:
        return self._current_queue or self._queue_by_tag(message.delivery_info)

    def _queue_by_tag(self, delivery: Mapping[str, Any]) -> str:
        """The queue of a RabbitMQ message, found by its consumer tag, since the routing key may be any text."""
        tags = getattr(self.task_consumer, "_active_tags", {})
        queues = [queue for queue, tag in tags.items() if tag == delivery.get("consumer_tag")]
        return str(queues[0] if queues else delivery.get("routing_key", ""))

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the channel of a lost connection completely, so that the worker can reconnect.

        To close a Redis channel, kombu first reads the pending reply. If the server is unavailable, the read raises an
        error and leaves the channel half closed. Celery then discards the connection. The next use of the channel (a
        second close, a late acknowledgement) would raise `AttributeError: 'NoneType' object has no attribute
        'hostname'`, which ends the worker. So this closes the channel twice before Celery discards the connection: the
        second call has no reply to read.
        """
        channel = getattr(self.task_consumer, "channel", None)
        if isinstance(channel, virtual.Channel):
            self.connection.maybe_close_channel(channel)
            self.connection.maybe_close_channel(channel)
        if self.rooms is not None:
            self.rooms.forget()
        super().on_connection_error_after_connected(exc)


def _restore_at_common_levels(channel: Any) -> None:
    """Make the Redis channel restore each message at its `restored_level`."""
    own_level = channel._get_message_priority  # noqa: SLF001 (kombu has no public way)

    def level(message: Any, *, reverse: bool = False) -> int:
        return restored_level(own_level(message, reverse=reverse))

    channel._get_message_priority = level  # noqa: SLF001 (as above)
