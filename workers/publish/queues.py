"""Queues of other programs at the broker, and the errors that concern a single queue or message.

RabbitMQ refuses a declaration whose arguments differ from those of the existing queue: a quorum queue, or one with
`x-max-priority`. Only the program that consumes a queue knows the queue's arguments, so perdure publishes to such a
queue by its name, and creates the queue only if it is missing. `wake` and `calls` call this module.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.exceptions import QueueNotFound
from kombu import Exchange, Producer, Queue
from kombu.common import Broadcast
from kombu.exceptions import EncodeError, OperationalError
from redis.exceptions import ResponseError

RETRY_ONCE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}

_NOT_FOUND = 404
_CHANNEL_CODES = {403, _NOT_FOUND, 405, 406}
"""The codes with which RabbitMQ closes a channel: access refused, not found, locked, precondition failed."""

_CONNECTION_CLASSES = {0, 10}
"""The AMQP classes of methods of a connection. RabbitMQ refuses a login with the code 403, too."""

_OF_A_KEY = ("WRONGTYPE", "NOPERM")


def concerns_one(error: Exception) -> bool:
    """Whether the broker, though available, refused one message: for its queue, its key or its arguments."""
    if isinstance(error, OperationalError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # kombu wraps errors after which a retry may succeed
    if isinstance(error, ResponseError):
        return any(code in str(error) for code in _OF_A_KEY)
    if isinstance(error, EncodeError | QueueNotFound):
        return True
    by_class = (getattr(error, "method_sig", None) or (0, 0))[0]
    return getattr(error, "reply_code", None) in _CHANNEL_CODES and by_class not in _CONNECTION_CLASSES


def queue_of(app: Celery, name: str) -> Queue:
    """The queue `name` as the settings of `app` declare it."""
    try:
        found: Queue = app.amqp.queues[name]
    except KeyError:  # `task_create_missing_queues` is false
        found = Queue(name, Exchange(name), name)
    return found


def by_name(producer: Producer, queue: Queue, wait_s: float) -> dict[str, Any]:
    """The options that publish to a queue of another program. On RabbitMQ, creates the queue if it is missing.

    An existing queue keeps its arguments. Waits at most `wait_s` seconds for a connection; a lost one is replaced.

    Raises:
        Exception: the broker's error; see `concerns_one`.
    """
    connection = producer.connection
    connection.ensure_connection(**RETRY_ONCE, timeout=wait_s)
    if connection.transport.driver_type != "amqp" or isinstance(queue, Broadcast):
        return {"queue": queue}
    connection.ensure(producer, _create_if_missing, **RETRY_ONCE)(producer, queue)
    return {"queue": queue, "exchange": "", "routing_key": queue.name, "declare": ()}


def _create_if_missing(producer: Producer, queue: Queue) -> None:
    """Create `queue` without its exchange and binding, which its consumers declare."""
    try:
        producer.channel.queue_declare(queue.name, passive=True)
    except producer.connection.channel_errors as error:  # the driver has opened the closed channel again
        if error.reply_code != _NOT_FOUND:
            raise
        queue(producer.channel).queue_declare()
