"""The consumer of an application's worker, if the worker consumes queues of perdure.

perdure's queues have the same limits as in perdure's own workers, and an unknown task returns to its queue. For the
application's queues, this consumer discards unknown tasks and runs Celery's built-in tasks, as Celery's consumer does.
The broker's keys belong to the application, so this consumer neither checks nor renames them.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis, virtual

from perdure.network.queues import QUEUES
from perdure.workers.consumer import malformed, tally
from perdure.workers.consumer.consumer import Consumer


class InstalledConsumer(Consumer):
    """perdure's consumer, except that Celery's own methods handle invalid messages of the application's queues."""

    def connection_for_read(self, heartbeat: float | None = None) -> Any:
        """Connect as Celery does, with the application's transport options only."""
        return super(Consumer, self).connection_for_read(heartbeat=heartbeat)

    def connect(self) -> Any:
        """Connect, and record each message's queue when it is delivered: the message itself does not name its queue."""
        connection: Any = super(Consumer, self).connect()
        if isinstance(connection.transport, virtual.Transport):
            self._note_queues(connection.transport, connection.default_channel)
        if isinstance(connection.transport, redis.Transport):
            malformed.screen_queues(connection.default_channel, self._dropped.note, QUEUES)
        return connection

    def _note_queues(self, transport: Any, channel: Any) -> None:
        deliver = transport._deliver  # noqa: SLF001 (kombu passes the queue's name only here)

        def note_and_deliver(message: Any, queue: str) -> None:
            if queue in QUEUES and (wrong := malformed.fault(message, channel)) is not None:
                self._dropped.note(queue, wrong)
                return
            self._current_queue = queue
            deliver(message, queue)

        transport._deliver = note_and_deliver  # noqa: SLF001 (as above)

    def register_with_event_loop(self, hub: Any) -> None:
        """Register as Celery does, and log the counts of dropped items at intervals.

        The broker's keys are not checked, since they belong to the application.
        """
        super(Consumer, self).register_with_event_loop(hub)
        hub.call_repeatedly(tally.REPORT_S, self._dropped.report)

    def update_strategies(self) -> None:
        """Build the strategies of all tasks, including Celery's built-in tasks."""
        super(Consumer, self).update_strategies()

    def on_unknown_task(self, body: Any, message: Any, exc: BaseException) -> None:
        """Return a message of perdure's queues to its queue after a pause; discard other messages, as Celery does."""
        handler: Any = super() if self._is_perdures(message) else super(Consumer, self)
        handler.on_unknown_task(body, message, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """See `on_unknown_task`."""
        handler: Any = super() if self._is_perdures(message) else super(Consumer, self)
        handler.on_unknown_message(body, message)

    def on_decode_error(self, message: Any, exc: BaseException) -> None:
        """Handle a message of perdure's queues as perdure's consumer does; handle other messages as Celery does."""
        handler: Any = super() if self._is_perdures(message) else super(Consumer, self)
        handler.on_decode_error(message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: BaseException) -> None:
        """See `on_decode_error`."""
        handler: Any = super() if self._is_perdures(message) else super(Consumer, self)
        handler.on_invalid_task(body, message, exc)

    def _is_perdures(self, message: Any) -> bool:
        return self._queue_of(message) in QUEUES
