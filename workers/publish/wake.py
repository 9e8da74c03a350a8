"""Publishes wake-ups as Celery messages. A lost wake-up is harmless: the sweeper issues it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery import Celery
from kombu import Producer
from kombu.transport import redis

from perdure.errors import loggable
from perdure.network.queues import QUEUES
from perdure.settings import Settings
from perdure.tasks.arguments import described
from perdure.workers.celery_application import broker_priority, is_amqp, make_app
from perdure.workers.publish.alarms import BrokerBlocked, publishing
from perdure.workers.publish.queues import RETRY_ONCE, by_name, concerns_one, queue_of

if TYPE_CHECKING:
    from perdure.assembly import Addresses

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Seconds after a failure during which nothing is published, so that only one caller waits for the broker.

An error that concerns one message, such as a refused queue, starts no pause.
"""

ENOUGH = 20
"""The wake-ups for turns that wait at the broker, from which on a due session needs none of its own.

One would do for correctness. With more, the workers that become free at the same time begin to drain at the same time,
and the loss of one, with a worker that is killed when it has taken it, delays nothing.
"""

_LEVELS = (0, 3, 6, 9)
"""The priority levels on Redis at which wake-ups are published (`broker_priority`) and restored."""


class _Unread:
    """The result object of a wake-up, which no caller reads. Replaces `AsyncResult`, whose import takes 60 ms."""

    def __init__(self, task_id: str) -> None:
        self.id = task_id


class CeleryWaker:
    """A `perdure.runtime.Waker` that publishes to the broker. Threads may share it.

    `app` is the Celery application that publishes. By default, `make_app` makes one for the broker of `where`.
    """

    def __init__(self, settings: Settings, where: Addresses, app: Celery | None = None) -> None:
        self._app = app or make_app(settings, where, publisher=True)
        self._broker_url = where.broker_url
        self.observe: Callable[[bool], None] = lambda _published: None
        """Called after each attempt to publish, with whether the broker accepted the message."""
        self._unavailable_until = 0.0
        self._has_published = False

    @property
    def app(self) -> Celery:
        return self._app

    def session(self, session_id: UUID, priority: int) -> bool:
        """Publish `turns.run`."""
        ranked = broker_priority(self._broker_url, priority)
        return self.publish("turns.run", {"session_id": str(session_id)}, queue="turns", priority=ranked)

    def drain(self, session_id: UUID, priority: int) -> bool:
        """Publish `turns.run`, unless enough of these messages wait at the broker."""
        return self.has_enough() or self.session(session_id, priority)

    def has_enough(self) -> bool:
        """See `perdure.runtime.Waker.has_enough`. False if the broker does not answer within about a second."""
        if time.monotonic() < self._unavailable_until:
            return False
        try:
            with publishing(self._app, PAUSE_S) as producer:
                return self.waiting(producer) >= ENOUGH
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
            log.debug("the broker does not tell how many wake-ups wait: %s", loggable(error))
            return False

    def waiting(self, producer: Producer) -> int:
        """The number of wake-ups for turns that wait at the broker.

        On RabbitMQ, 0 until this process has published one: the broker closes a channel that asks for a missing queue.
        """
        channel: Any = producer.channel
        if isinstance(channel, redis.Channel):
            with channel.conn_or_acquire() as client:
                pipeline = client.pipeline(transaction=False)
                for level in _LEVELS:
                    pipeline.llen(channel._q_for_pri("turns", level))  # noqa: SLF001 (kombu has no public way)
                return int(sum(pipeline.execute()))
        return int(channel.queue_declare("turns", passive=True).message_count) if self._has_published else 0

    def delivery(self, delivery_id: UUID) -> bool:
        return self.publish("deliveries.send", {"delivery_id": str(delivery_id)}, queue="deliveries")

    def ending(self, session_id: UUID) -> bool:
        return self.publish("sessions.end", {"session_id": str(session_id)}, queue="sessions")

    def consolidation(self, session_id: UUID | None) -> bool:
        """Publish `memory.consolidate_session`, or `memory.consolidate` if `session_id` is `None`."""
        if session_id is None:
            return self.publish("memory.consolidate", {}, queue="memory")
        return self.publish("memory.consolidate_session", {"session_id": str(session_id)}, queue="memory")

    def casebank(self) -> bool:
        return self.publish("casebank.advance", {}, queue="maintenance")

    def publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        """Publish one task within about a second; returns whether the broker accepted it.

        Celery's events show only the ids among the task's arguments.
        """
        published = self._publish(task, arguments, **options)
        self.observe(published)
        return published

    def _publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        if time.monotonic() < self._unavailable_until:
            return False
        try:
            with publishing(self._app, PAUSE_S) as producer:
                if (queue := options.get("queue")) is not None and queue not in QUEUES:
                    options |= by_name(producer, queue_of(self._app, queue), PAUSE_S)
                self._app.send_task(
                    task,
                    kwargs=arguments,
                    producer=producer,
                    ignore_result=True,
                    result_cls=_Unread,
                    add_to_parent=False,
                    retry=True,
                    retry_policy=RETRY_ONCE,
                    **described((), arguments),
                    **options,
                )
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own; the sweeper repeats this)
            if not concerns_one(error):
                self._unavailable_until = time.monotonic() + PAUSE_S
            log.warning("the broker did not accept %s (%s); the sweeper will issue it again", task, loggable(error))
            return False
        self._has_published |= options.get("queue") == "turns"
        return True

    def ask(self, question: str, within_s: float) -> dict[str, Any]:
        """Broadcast a remote-control command and collect replies for `within_s` seconds; returns the replies by worker.

        Returns an empty dict on error.
        """
        began = time.monotonic()
        answers: dict[str, Any] = {}
        try:
            for answer in self._app.control.broadcast(question, reply=True, timeout=within_s) or ():
                answers |= answer
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
            log.warning("the workers cannot be inspected (%s)", loggable(error))
            time.sleep(max(within_s - (time.monotonic() - began), 0))
        return answers

    def reachable(self) -> bool:
        """Connect to the broker; returns whether the connection succeeds.

        Raises:
            BrokerBlocked: RabbitMQ blocks the connection on which this process has published last.
        """
        error = self.failure()
        if error is not None:
            log.debug("the broker cannot be reached: %s", loggable(error))
        return error is None

    def failure(self) -> Exception | None:
        """Connect to the broker; returns why the connection fails, or `None`. See `reachable`."""
        try:
            with self._app.connection_for_write() as connection:
                tries = max(len(connection.alt), 1)  # each server of several
                connection.ensure_connection(max_retries=tries, interval_start=0, timeout=PAUSE_S)
                connection.default_channel.close()
            if is_amqp(self._broker_url):
                with publishing(self._app, PAUSE_S):
                    pass
        except BrokerBlocked:
            raise
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
            return error
        return None

    def close(self) -> None:
        self._app.close()
