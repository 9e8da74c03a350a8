"""Publishing while RabbitMQ has an alarm: short of memory or disk, it stops reading from connections that publish.

RabbitMQ also does not notice that such a *blocked* connection has ended. A publisher that timed out and connected again
would leave one more connection with each attempt, and its messages, which the broker reads after the alarm. So a
blocked connection stays in the pool, and nothing is written to it until RabbitMQ unblocks it. `wake`, `background` and
`calls` publish by `publishing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery
from kombu import Producer

from perdure.errors import Unavailable
from perdure.workers.publish.queues import RETRY_ONCE


class BrokerBlocked(Unavailable):
    """RabbitMQ accepts no messages from the connection."""

    def __init__(self) -> None:
        super().__init__("RabbitMQ accepts no messages: it has an alarm for memory or disk.")


class _Alarm:
    """Whether RabbitMQ blocks one connection. The driver calls `begin` and `end`.

    `is_awaited` while perdure publishes over the connection, which may be of an application's pool.
    """

    def __init__(self) -> None:
        self.is_on = self.is_awaited = False

    def begin(self, _reason: str) -> None:
        """Note the alarm, and end perdure's wait for the message that RabbitMQ does not confirm."""
        self.is_on = True
        if self.is_awaited:
            raise BrokerBlocked

    def end(self) -> None:
        self.is_on = False

    def goes_on(self, driver: Any) -> bool:
        """Whether RabbitMQ still blocks the connection. Handles what it has sent, without waiting."""
        with suppress(TimeoutError):  # it has sent nothing
            driver.drain_events(timeout=0)
        return self.is_on


@contextmanager
def publishing(app: Celery, wait_s: float) -> Iterator[Producer]:
    """A producer of the pool of `app`, for the block. Waits at most `wait_s` seconds for a connection.

    Raises:
        BrokerBlocked: RabbitMQ blocks the connection, which it may also begin to do within the block.
        Exception: the broker's error.
    """
    blocked: BrokerBlocked | None = None
    with app.producer_or_acquire() as producer:
        alarm: _Alarm | None = None
        try:
            alarm = _require_unblocked(producer, wait_s)
            yield producer
        except BrokerBlocked as error:  # kombu would close the connection after an error
            blocked = error
        finally:
            if alarm is not None:
                alarm.is_awaited = False
    if blocked is not None:
        raise blocked


def _require_unblocked(producer: Producer, wait_s: float) -> _Alarm | None:
    """Raise `BrokerBlocked` if RabbitMQ still blocks the connection. Returns what heeds its next alarm, if anything.

    A connection that RabbitMQ has unblocked is replaced: its next confirmation is that of an earlier message.
    """
    connection = producer.connection
    if connection.transport.driver_type != "amqp":
        return None
    tries = {**RETRY_ONCE, "max_retries": max(len(connection.alt), 1)}  # each server of several
    connection.ensure_connection(**tries, timeout=wait_s)
    alarm = getattr(connection.connection.on_blocked, "__self__", None)
    if isinstance(alarm, _Alarm) and alarm.is_on:
        if alarm.goes_on(connection.connection):
            raise BrokerBlocked
        connection.collapse()
        connection.ensure_connection(**tries, timeout=wait_s)
        producer.revive(connection.default_channel)
    if connection.connection.on_blocked is None:
        alarm = _Alarm()
        connection.connection.on_blocked, connection.connection.on_unblocked = alarm.begin, alarm.end
    if not isinstance(alarm, _Alarm):
        return None  # an application has a hook of its own
    alarm.is_awaited = True
    return alarm
