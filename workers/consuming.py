"""What a worker does with its connection to the broker: Celery's consumer, which survives the loss of a Redis.

It also returns messages of other applications to their queue (see `unknown_tasks`).
"""

from __future__ import annotations

from typing import Any

from celery.worker import consumer
from kombu.transport import redis, virtual

from workers.unknown_tasks import UnknownTasks

_BUILT_IN = "celery."
"""How the names of Celery's built-in tasks begin. perdure publishes none: in a shared queue they are the other
application's, whose tasks they call."""


class Consumer(consumer.Consumer):  # type: ignore[misc]  # celery carries no types
    """Celery's, with two changes.

    A message that is no task of perdure's is returned to its queue after a pause; Celery would discard it.

    The channel of a lost connection is closed twice. Closing a Redis channel first reads the reply that it waits
    for. If the server is gone and another socket of the worker failed first, that read aborts the closing; Celery
    discards the connection all the same, and the next use of the channel (the second closing, a late
    acknowledgement) raises `AttributeError: 'NoneType' object has no attribute 'hostname'`, which ends the worker.
    A second attempt, before the connection is discarded, finds nothing left to read.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._unknown = UnknownTasks(self)
        self._arrives_from = ""
        super().__init__(*args, **options)

    def connect(self) -> Any:
        """Connect, and note from then on which queue each message comes from: a message does not say."""
        connection = super().connect()
        if isinstance(connection.transport, virtual.Transport):
            self._note_arrivals(connection.transport)
        if isinstance(connection.transport, redis.Transport):
            self._record_arrivals(connection.default_channel.qos)
        return connection

    def _note_arrivals(self, transport: Any) -> None:
        deliver = transport._deliver  # noqa: SLF001 (there is no public way to the queue's name)

        def note_and_deliver(message: Any, queue: str) -> None:
            self._arrives_from = queue
            deliver(message, queue)

        transport._deliver = note_and_deliver  # noqa: SLF001 (as above)

    def _record_arrivals(self, unacknowledged: Any) -> None:
        """Have each unacknowledged message recorded as sent to its queue by name, which it then is restored to.

        kombu publishes a restored message to its exchange again: to every queue that is bound there, and to none if
        the exchange's type is one that only the other application has declared.
        """
        append = unacknowledged.append

        def append_as_sent_by_name(message: Any, delivery_tag: str) -> None:
            published = message.delivery_info
            message.delivery_info = {"exchange": "", "routing_key": self._arrives_from}
            try:
                append(message, delivery_tag)
            finally:
                message.delivery_info = published

        unacknowledged.append = append_as_sent_by_name

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

    def on_close(self) -> None:
        """Return what is held now if the worker stops; forget it if the connection is lost."""
        if self.connection is None:
            self._unknown.forget()
        else:
            self._unknown.release_all()
        super().on_close()

    def _return(self, message: Any, what: str) -> None:
        self._unknown.hold(message, self._arrives_from or message.delivery_info.get("routing_key", ""), what)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the connection to the end, so that the next attempt makes a new one."""
        channel = getattr(self.task_consumer, "channel", None)
        if isinstance(channel, virtual.Channel):
            self.connection.maybe_close_channel(channel)
            self.connection.maybe_close_channel(channel)
        super().on_connection_error_after_connected(exc)
