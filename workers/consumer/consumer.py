"""A worker's consumer: Celery's, with a bound for each queue.

It survives the loss of a Redis, and keys of Redis that another program broke or uses (see
`perdure.workers.consumer.broken_keys`). It takes from a queue only what it can begin at once (see
`perdure.workers.consumer.room`), returns messages of other applications to their queue (see
`perdure.workers.consumer.unknown_tasks`), and drops what it cannot read (see `perdure.workers.consumer.malformed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery.concurrency.thread import TaskPool
from celery.exceptions import TaskRevokedError
from celery.worker import consumer
from kombu.transport import redis, virtual

from perdure.workers.application import restored_level
from perdure.workers.consumer import broken_keys, malformed
from perdure.workers.consumer.room import Rooms
from perdure.workers.consumer.unknown_tasks import UnknownTasks

log = logging.getLogger(__name__)

_BUILT_IN = "celery."
"""How the names of Celery's built-in tasks begin. perdure publishes none: in a shared queue they are the other
application's, whose tasks they call."""

_AHEAD = 8
"""Messages that RabbitMQ sends ahead. One round trip brings several; few go back when there is no room."""


class Consumer(consumer.Consumer):  # type: ignore[misc]  # celery carries no types
    """Celery's, with these changes.

    Each queue has room of its own. A message that is no task of perdure's is returned to its queue after a pause;
    Celery would discard it. An item that cannot be read is dropped; Celery would end, or log it in full. The channel
    of a lost connection is closed completely. Broken keys stop no other queue.
    """

    rooms: Rooms | None = None
    """None with another pool than `threads`: Celery's prefetch count is the only bound then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._unknown = UnknownTasks(self)
        self._dropped = malformed.Dropped()
        self._arrives_from = ""
        super().__init__(*args, **options)
        self._keys = broken_keys.BrokenKeys(self.app)
        if not isinstance(self.pool, TaskPool):
            return
        rooms = self.rooms = Rooms(self.pool.limit, self)
        threads = sum(rooms.of(queue) for queue in self.app.amqp.queues.consume_from)
        self.pool.executor = ThreadPoolExecutor(max_workers=threads)
        self._ahead = threads
        if self.conninfo.transport.driver_type == "amqp":
            self._ahead = rooms.of("ingress") + _AHEAD  # a submission is acknowledged when it is accepted
        self.initial_prefetch_count = self._ahead
        self.on_task_request = self._begin

    @property
    def max_prefetch_count(self) -> int:
        """Messages that the broker may send and this worker has not acknowledged."""
        return self._ahead if self.rooms is not None else super().max_prefetch_count

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """What is called with each message: Celery's handler, if there is room."""
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
        """Have the event loop call `work(queue)`."""
        self.call_soon(work, queue)

    def cancel(self, queue: str) -> None:
        """Stop taking from a queue."""
        if self.task_consumer is not None:
            self.task_consumer.cancel_by_queue(queue)

    def consume(self, queue: str) -> None:
        """Take from a queue again.

        Not if the worker stops, the queue was deselected (the intake is closed), it has no room, or too many messages
        of it are held: whatever ends the last of these calls this again.
        """
        tasks, queues = self.task_consumer, self.app.amqp.queues
        if tasks is None or queue not in queues.consume_from or tasks.consuming_from(queue):
            return
        if self._unknown.is_full(queue) or (self.rooms is not None and self.rooms.is_cancelled(queue)):
            return
        declares, tasks.auto_declare = tasks.auto_declare, False  # it was declared when the worker connected
        try:
            tasks.add_queue(queues[queue])
        finally:
            tasks.auto_declare = declares
        tasks.consume()
        self._end_wait(tasks.channel)

    def _end_wait(self, channel: Any) -> None:
        """Have Redis answer the pending BRPOP now, so that the next one names the queue that was added.

        kombu sends the next BRPOP only when Redis has answered the pending one, up to a second later. A shorter
        timeout of BRPOP would cost every idle worker 10 to 20 commands a second. The command runs on another
        connection, and it changes nothing if BRPOP already has a message. A server that refuses it (by an access
        list, or because it speaks only the older protocol and sends no id) costs up to that second.
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
                log.debug("Redis refuses CLIENT UNBLOCK: %s", error)

    def _begin(self, request: Any) -> None:
        """Run a task in the pool as soon as there is room, and count it until it has ended.

        While it waits it takes no prefetch slot: all queues share them.
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
            result.f.add_done_callback(lambda _: rooms.leave(queue))

    def connection_for_read(self, heartbeat: float | None = None) -> Any:
        """Connect, and write messages back at levels that every consumer of the queue reads.

        This must happen here: the first restoring, right after connecting, already uses this channel.
        """
        connection = super().connection_for_read(heartbeat=heartbeat)
        if isinstance(connection.transport, redis.Transport):
            _restore_where_all_read(connection.default_channel)
            self._keys.pass_over_taken(connection.default_channel)
            self._look_at_keys(connection.default_channel)
        return connection

    def register_with_event_loop(self, hub: Any) -> None:
        """Look for broken keys now and then, for publishers cannot set them aside; report what was dropped."""
        super().register_with_event_loop(hub)
        hub.call_repeatedly(malformed.REPORT_S, self._dropped.report)
        channel = self.task_consumer.channel
        if isinstance(channel, redis.Channel):
            hub.call_repeatedly(broken_keys.LOOK_S, self._look_at_keys, channel)

    def _look_at_keys(self, channel: Any) -> list[str]:
        """Set broken keys aside, and take from the queues whose keys no other program uses."""
        before = self._keys.taken
        renamed = self._keys.look(channel)
        if self._keys.taken != before:
            channel._update_queue_cycle()  # noqa: SLF001 (kombu has no public way)
            self._end_wait(channel)
        return renamed

    def connect(self) -> Any:
        """Connect, and note from then on which queue each message comes from: a message does not say."""
        connection = super().connect()
        if isinstance(connection.transport, virtual.Transport):
            self._note_arrivals(connection.transport, connection.default_channel)
        if isinstance(connection.transport, redis.Transport):
            self._record_arrivals(connection.default_channel)
            malformed.screen(connection.transport, connection.default_channel, self._dropped.note)
        return connection

    def _note_arrivals(self, transport: Any, channel: Any) -> None:
        deliver = transport._deliver  # noqa: SLF001 (there is no public way to the queue's name)

        def note_and_deliver(message: Any, queue: str) -> None:
            if (wrong := malformed.fault(message, channel)) is not None:
                self._dropped.note(queue, wrong)
                return
            self._arrives_from = queue
            deliver(message, queue)

        transport._deliver = note_and_deliver  # noqa: SLF001 (as above)

    def _record_arrivals(self, channel: Any) -> None:
        """Have each unacknowledged message recorded as sent to its queue by name, which it then is restored to.

        kombu publishes a restored message to its exchange again: to every queue that is bound there, and to none if
        the exchange's type is one that only the other application has declared.

        A message that arrives is no longer in its queue: where a broken key keeps it from being recorded, the key
        is set aside and the message recorded then.
        """
        append = channel.qos.append

        def append_as_sent_by_name(message: Any, delivery_tag: str) -> None:
            published = message.delivery_info
            message.delivery_info = {"exchange": "", "routing_key": self._arrives_from}
            try:
                append(message, delivery_tag)
            except channel.ResponseError:
                if not self._look_at_keys(channel):
                    raise
                append(message, delivery_tag)
            finally:
                message.delivery_info = published

        channel.qos.append = append_as_sent_by_name

    def update_strategies(self) -> None:
        """Run the application's own tasks, not Celery's built-in ones."""
        super().update_strategies()
        for name in [name for name in self.strategies if name.startswith(_BUILT_IN)]:
            del self.strategies[name]

    def on_unknown_task(self, body: Any, message: Any, exc: BaseException) -> None:  # noqa: ARG002 (Celery's signature)
        """Return another application's task to its queue after a pause."""
        self._return(message, f"the task {exc.args[0]!r}")

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002 (Celery's signature)
        """Return a message that is no task to its queue after a pause."""
        self._return(message, "a message that is no task")

    def on_decode_error(self, message: Any, exc: BaseException) -> None:
        """Drop a message whose body cannot be decoded, if it is for perdure; return another one to its queue.

        Another application may use content types that perdure does not accept. A command has no queue to return to.
        """
        task = message.headers.get("task") if isinstance(message.headers, Mapping) else None
        is_ours = isinstance(task, str) and task in self.strategies
        if is_ours or self._came_from(message) not in self.app.amqp.queues:
            self._drop(message, malformed.reason(exc))
        else:
            self._return(message, "a message that cannot be decoded")

    def on_invalid_task(self, body: Any, message: Any, exc: BaseException) -> None:  # noqa: ARG002 (Celery's signature)
        """Drop a task whose headers or body are invalid, or of a content type that is not accepted."""
        self._drop(message, malformed.reason(exc))

    def on_close(self) -> None:
        """Return what is held now if the worker stops; forget it if the connection is lost. Report what was dropped."""
        self._dropped.report()
        if self.connection is None:
            self._unknown.forget()
        else:
            self._unknown.release_all()
        super().on_close()

    def _return(self, message: Any, what: str) -> None:
        self._unknown.hold(message, self._came_from(message), what)

    def _drop(self, message: Any, reason: str, queue: str = "") -> None:
        self._dropped.note(queue or self._came_from(message), reason)
        if not message.acknowledged:
            message.reject_log_error(log, self.connection_errors)

    def _came_from(self, message: Any) -> str:
        return self._arrives_from or self._consumed_from(message.delivery_info)

    def _consumed_from(self, delivery: Mapping[str, Any]) -> str:
        """The queue of a message of RabbitMQ, whose routing key may be the other application's."""
        tags = getattr(self.task_consumer, "_active_tags", {})
        queues = [queue for queue, tag in tags.items() if tag == delivery.get("consumer_tag")]
        return str(queues[0] if queues else delivery.get("routing_key", ""))

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the channel of a lost connection completely, so that the next attempt makes a new one.

        Closing a Redis channel begins with reading a pending reply. If the server is gone, and another of the
        worker's sockets was found dead first, this ends the closing early; Celery discards the connection all the
        same, and the next use of the channel (the second closing, a late acknowledgement) raises
        `AttributeError: 'NoneType' object has no attribute 'hostname'`: an unrecoverable error, and the worker
        ends. A second attempt, before the connection is discarded, finds nothing left to read.
        """
        channel = getattr(self.task_consumer, "channel", None)
        if isinstance(channel, virtual.Channel):
            self.connection.maybe_close_channel(channel)
            self.connection.maybe_close_channel(channel)
        if self.rooms is not None:
            self.rooms.lost()
        super().on_connection_error_after_connected(exc)


def _restore_where_all_read(channel: Any) -> None:
    """Have the Redis channel write each message back at its `restored_level`."""
    own_level = channel._get_message_priority  # noqa: SLF001 (kombu has no public way)

    def level(message: Any, *, reverse: bool = False) -> int:
        return restored_level(own_level(message, reverse=reverse))

    channel._get_message_priority = level  # noqa: SLF001 (as above)
