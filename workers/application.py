"""The Celery application of workers, beat, Flower and publishers.

Messages are JSON. A wake-up is acknowledged on delivery, since PostgreSQL has the work; a submission is acknowledged
once it is accepted. Every wait for the broker has a timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Celery
from kombu import Exchange, Queue

from perdure.network.queues import QUEUES
from perdure.settings import Settings

if TYPE_CHECKING:
    from perdure.workers.assembly import Addresses

INCLUDED = (
    "perdure.tasks.turns",
    "perdure.tasks.deliveries",
    "perdure.tasks.sessions",
    "perdure.tasks.memory",
    "perdure.tasks.casebank",
    "perdure.tasks.maintenance",
    "perdure.workers.control",
)

ROUTES = {
    "turns.submit": "ingress",
    "turns.*": "turns",
    "deliveries.*": "deliveries",
    "sessions.*": "sessions",
    "memory.*": "memory",
    "casebank.*": "maintenance",
    "maintenance.*": "maintenance",
}

PRIORITIES = {"ingress": 9, "turns": 5, "deliveries": 5, "sessions": 5, "memory": 2, "maintenance": 2}
"""The priority of a queue's tasks, 9 first; a session's wake-up has the priority of its turn.

On Redis it also orders the queues: `ingress` is first, `memory` and `maintenance` are last. No queue starves, since
each has room of its own (`perdure.workers.consumer.room`).
"""

CONCURRENCY = 100
"""Concurrent turns of a worker process without `--concurrency`. Turns mostly wait for a model."""

_PRIORITIES = 10
_WORKER_WAIT_S = 5.0
_PUBLISH_WAIT_S = 0.5

REDELIVER_S = 60
"""Redis's visibility timeout in seconds: an unacknowledged message is redelivered after it."""


def make_app(settings: Settings, where: Addresses, *, publisher: bool = False) -> Celery:
    """The application for the servers at `where`. A `publisher` has timeouts of half a second, others of five."""
    app = Celery("perdure", broker=where.broker_url, backend=where.redis_url, include=INCLUDED)
    wait_s = _PUBLISH_WAIT_S if publisher else _WORKER_WAIT_S
    app.conf.update(
        timezone=settings.timezone,
        enable_utc=True,
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        accept_content=["json"],
        task_queues=[_queue(name, where.broker_url) for name in QUEUES],
        task_default_queue="ingress",
        task_create_missing_queues=True,
        task_routes=_routes(where.broker_url),
        task_ignore_result=True,
        result_expires=86_400,
        worker_consumer="perdure.workers.consumer.consumer:Consumer",
        worker_pool="threads",
        worker_concurrency=CONCURRENCY,
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,  # `perdure.workers.consumer.room` limits consumption
        worker_send_task_events=False,  # they cost a sixth of a worker's time; Flower enables them while it runs
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # If Redis refuses a command, reconnect and do not end the worker (`perdure.workers.consumer.broken_keys`).
        broker_channel_error_retry=not where.broker_url.startswith(("amqp", "pyamqp")),
        broker_pool_limit=16,
        broker_heartbeat=10,
        broker_connection_timeout=wait_s,
        broker_transport_options=transport_options(where.broker_url, wait_s, settings.redis_prefix),
        # Keeps these workers out of the `celery inspect`, Flower and gossip of other applications on the broker.
        control_exchange=f"{settings.redis_prefix}celery",
        event_exchange=f"{settings.redis_prefix}celeryev",
        redis_socket_timeout=_WORKER_WAIT_S,
        redis_socket_connect_timeout=_WORKER_WAIT_S,
        redis_retry_on_timeout=True,
        redis_backend_health_check_interval=int(_WORKER_WAIT_S),
    )
    return app


def registered() -> frozenset[str]:
    """The names of all tasks."""
    app = Celery("perdure", include=INCLUDED, set_as_current=False)
    app.loader.import_default_modules()
    return frozenset(app.tasks)


def transport_options(broker_url: str, wait_s: float, prefix: str) -> dict[str, Any]:
    """The transport's options: timeouts of `wait_s` seconds, and on Redis the keys of unacknowledged messages.

    The keys begin with `prefix`. Under kombu's default keys, which all applications on the database share, the short
    visibility timeout would redeliver the running and postponed tasks of other applications.
    """
    if broker_url.startswith(("amqp", "pyamqp")):
        return {"confirm_publish": True, "connect_timeout": wait_s, "read_timeout": wait_s, "write_timeout": wait_s}
    return {
        # These include each level of a publisher with kombu's defaults.
        "priority_steps": list(range(_PRIORITIES)),
        "socket_timeout": wait_s,
        "socket_connect_timeout": wait_s,
        "health_check_interval": int(_WORKER_WAIT_S),
        # Redelivers the unacknowledged submissions of a killed worker. A wake-up that waits longer in a busy worker
        # is delivered twice, which is harmless.
        "visibility_timeout": REDELIVER_S,
        "unacked_key": f"{prefix}unacked",
        "unacked_index_key": f"{prefix}unacked_index",
        "unacked_mutex_key": f"{prefix}unacked_mutex",
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }


def broker_priority(broker_url: str, priority: int) -> int:
    """The broker's value for a priority of perdure (9 first).

    RabbitMQ delivers 9 first. On Redis level 0 is first, and each level is a list: consumers with kombu's defaults read
    the levels 0, 3, 6 and 9, so perdure publishes to these only. Its workers read all ten.
    """
    if broker_url.startswith(("amqp", "pyamqp")):
        return priority
    return (_PRIORITIES - 1 - priority) // 3 * 3


def restored_level(level: int) -> int:
    """The Redis level to which a message of `level` returns.

    kombu computes the level from the message's priority and the `priority_steps` of the process that returns it. With
    the ten steps of perdure's workers, a message that a default publisher put on level 3 would return to level 4 or 5,
    which no default consumer reads.
    """
    return level // 3 * 3


def _routes(broker_url: str) -> dict[str, dict[str, Any]]:
    """The queue and priority of each task that this application publishes."""
    return {
        task: {"queue": queue, "priority": broker_priority(broker_url, PRIORITIES[queue])}
        for task, queue in ROUTES.items()
    }


def _queue(name: str, broker_url: str) -> Queue:
    # RabbitMQ refuses a declaration with other arguments than the queue has. Other publishers declare queues without
    # any, so only `turns`, which they do not publish to, has one.
    ranked = name == "turns" and broker_url.startswith(("amqp", "pyamqp"))
    arguments = {"x-max-priority": _PRIORITIES - 1} if ranked else None
    return Queue(name, Exchange(name), routing_key=name, queue_arguments=arguments)
