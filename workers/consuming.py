"""What a worker does with its connection to the broker: Celery's consumer, which outlives the loss of a Redis."""

from __future__ import annotations

from celery.worker import consumer
from kombu.transport import virtual


class Consumer(consumer.Consumer):  # type: ignore[misc]  # celery carries no types
    """Celery's, but for one thing: the channel of a connection that was lost is closed to the end.

    Closing a channel of Redis begins with reading what it waits for. If the server is gone, and another
    of the worker's sockets was found dead first, that ends the closing; Celery takes the connection apart
    all the same, and the next to touch the channel (the second closing, a late acknowledgement) meets
    `AttributeError: 'NoneType' object has no attribute 'hostname'`: an unrecoverable error, and the worker leaves.
    A second attempt, before the connection is taken apart, finds nothing left to read.
    """

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Let go of the connection, so that the next attempt makes a new one."""
        channel = getattr(self.task_consumer, "channel", None)
        if isinstance(channel, virtual.Channel):
            self.connection.maybe_close_channel(channel)
            self.connection.maybe_close_channel(channel)
        super().on_connection_error_after_connected(exc)
