"""The Celery application: the same for workers, beat, Flower and publishers.

JSON only. Wake-ups are acknowledged early, since PostgreSQL has what is due; submitted messages are acknowledged when
they are accepted. Every wait for the broker is bounded.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Exchange, Queue

from perdure.network.queues import QUEUES
from perdure.settings import Settings
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
"""Priority of a queue's tasks, 9 first; a wake-up of a session has its turn's instead. Redis goes by it across
queues: messages are accepted first; deliveries and endings take turns with the turns of the default priority; what
is done to memories comes last. None starves, since each queue has threads of its own (`perdure.workers.consumer.room`).
"""

CONCURRENCY = 100
"""Turns that one worker process runs at once, without `--concurrency`: they mostly wait."""

_PRIORITIES = 10
_WORKER_WAIT_S = 5.0
_PUBLISH_WAIT_S = 0.5

REDELIVER_S = 60
"""Redis's visibility timeout: a message is delivered again if it is unacknowledged after these seconds."""


def make_app(settings: Settings, where: Addresses, *, publisher: bool = False) -> Celery:
    """The application for the servers at `where`.

    A `publisher` gives up on a broker within about a second, as a wake-up must.
    """
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
        worker_enable_prefetch_count_reduction=False,  # `perdure.workers.consumer.room` bounds what a worker takes
        worker_send_task_events=False,  # a sixth of a worker's time; Flower switches them on while it runs
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # A command that Redis refuses costs a new connection, not the worker (`perdure.workers.consumer.broken_keys`).
        broker_channel_error_retry=not where.broker_url.startswith(("amqp", "pyamqp")),
        broker_pool_limit=16,
        broker_heartbeat=10,
        broker_connection_timeout=wait_s,
        broker_transport_options=transport_options(where.broker_url, wait_s, settings.redis_prefix),
        # An application on the same broker does not see these workers in its `celery inspect`, Flower or gossip.
        control_exchange=f"{settings.redis_prefix}celery",
        event_exchange=f"{settings.redis_prefix}celeryev",
        redis_socket_timeout=_WORKER_WAIT_S,
        redis_socket_connect_timeout=_WORKER_WAIT_S,
        redis_retry_on_timeout=True,
        redis_backend_health_check_interval=int(_WORKER_WAIT_S),
    )
    return app


def registered() -> frozenset[str]:
    """The names of the tasks that workers run."""
    app = Celery("perdure", include=INCLUDED, set_as_current=False)
    app.loader.import_default_modules()
    return frozenset(app.tasks)


def transport_options(broker_url: str, wait_s: float, prefix: str) -> dict[str, Any]:
    """Bounds on each wait for the broker, as its transport names them; `wait_s` in seconds.

    On Redis also the keys, beginning with `prefix`, where unacknowledged messages are kept. Under kombu's own
    names, which every application on the database shares, this short visibility timeout would hand out the
    running and postponed tasks of the other applications again.
    """
    if broker_url.startswith(("amqp", "pyamqp")):
        return {"confirm_publish": True, "connect_timeout": wait_s, "read_timeout": wait_s, "write_timeout": wait_s}
    return {
        # Every level that a publisher with kombu's defaults may use is among these.
        "priority_steps": list(range(_PRIORITIES)),
        "socket_timeout": wait_s,
        "socket_connect_timeout": wait_s,
        "health_check_interval": int(_WORKER_WAIT_S),
        # What a killed worker had taken and not acknowledged (a submission) is handed out again
        # after so many seconds. Wake-ups that wait in a busy worker for longer come twice, which is harmless.
        "visibility_timeout": REDELIVER_S,
        "unacked_key": f"{prefix}unacked",
        "unacked_index_key": f"{prefix}unacked_index",
        "unacked_mutex_key": f"{prefix}unacked_mutex",
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }


def broker_priority(broker_url: str, priority: int) -> int:
    """A priority of perdure (9 first) in the broker's terms.

    RabbitMQ takes 9 first. Redis takes 0 first and has a list for each level: kombu's default consumers read
    those of 0, 3, 6 and 9, so nothing else is published. perdure's workers read all ten.
    """
    if broker_url.startswith(("amqp", "pyamqp")):
        return priority
    return (_PRIORITIES - 1 - priority) // 3 * 3


def restored_level(level: int) -> int:
    """The level on Redis at which a message of `level` is written back to its queue.

    kombu computes the list from the message's own priority and the steps of the process that writes it back. With the
    ten steps of perdure's workers, a message that a default publisher put in the list of level 3 would return to level
    4 or 5, which no default consumer reads.
    """
    return level // 3 * 3


def _routes(broker_url: str) -> dict[str, dict[str, Any]]:
    """Queue and priority of each task that is published with this application: by the gateway, a worker or beat."""
    return {
        task: {"queue": queue, "priority": broker_priority(broker_url, PRIORITIES[queue])}
        for task, queue in ROUTES.items()
    }


def _queue(name: str, broker_url: str) -> Queue:
    # RabbitMQ refuses a publisher that declares a queue with other arguments than it has: the
    # queues that others publish to have none.
    ranked = name == "turns" and broker_url.startswith(("amqp", "pyamqp"))
    arguments = {"x-max-priority": _PRIORITIES - 1} if ranked else None
    return Queue(name, Exchange(name), routing_key=name, queue_arguments=arguments)
