"""The Celery application of workers, beat, Flower and publishers.

Messages are JSON. A wake-up names work that is stored in PostgreSQL, so the worker acknowledges it before running its
task. A submission contains a message to an agent; the worker acknowledges the submission once that message is
committed. Every wait for the broker has a timeout.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.signals import import_modules
from kombu import Exchange, Queue

from perdure.network import tls
from perdure.network.queues import QUEUES
from perdure.settings import Settings
from perdure.workers.pools import IsolatedApp

if TYPE_CHECKING:
    from perdure.assembly import Addresses

TASK_MODULES = (
    "perdure.tasks.turns",
    "perdure.tasks.deliveries",
    "perdure.tasks.sessions",
    "perdure.tasks.memory",
    "perdure.tasks.casebank",
    "perdure.tasks.maintenance",
)

ROUTES = {
    "turns.route": "ingress",
    "turns.submit": "ingress",
    "turns.tool_result": "ingress",
    "turns.*": "turns",
    "deliveries.*": "deliveries",
    "sessions.*": "sessions",
    "memory.*": "memory",
    "casebank.*": "maintenance",
    "maintenance.*": "maintenance",
}

TASKS = frozenset(
    {
        "turns.submit",
        "turns.route",
        "turns.tool_result",
        "turns.run",
        "deliveries.send",
        "sessions.end",
        "sessions.expire_idle",
        "memory.consolidate",
        "memory.consolidate_session",
        "memory.decay",
        "memory.refresh_hot",
        "casebank.prune",
        "casebank.advance",
        "casebank.count",
        "casebank.reflect",
        "casebank.suggest",
        "maintenance.retain",
    }
)
"""The names of all of perdure's tasks, for processes that do not load the task modules."""

PRIORITIES = {"ingress": 9, "turns": 5, "deliveries": 5, "sessions": 5, "memory": 2, "maintenance": 2}
"""The priority of each queue's tasks; 9 is the highest. `turns.run` has the priority of its turn instead.

On Redis the priorities also order the queues: workers consume `ingress` first, `memory` and `maintenance` last. No
queue starves, since a worker stops consuming a queue that has reached its limit of concurrent tasks
(`perdure.workers.consumer.room`).
"""

CONCURRENCY = 100
"""The default of `--concurrency`, the most concurrent turns of a worker process. Turns mostly wait for a model."""

_PRIORITIES = 10
_WORKER_WAIT_S = 5.0
_PUBLISH_WAIT_S = 0.5

REDELIVER_S = 60
"""The visibility timeout on Redis, in seconds, after which an unacknowledged message is redelivered."""


def make_app(settings: Settings, where: Addresses, *, publisher: bool = False) -> Celery:
    """Make the application for the servers at `where`. Broker timeouts are 0.5 s for a `publisher`, otherwise 5 s."""
    app = connected_app("perdure", where)
    wait_s = _PUBLISH_WAIT_S if publisher else _WORKER_WAIT_S
    app.conf.update(
        timezone=settings.timezone,
        enable_utc=True,
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        accept_content=["json"],
        task_queues=queues(where.broker_url),
        task_default_queue="ingress",
        task_create_missing_queues=True,
        task_routes=routes(where.broker_url),
        task_ignore_result=True,
        result_expires=86_400,
        worker_consumer="perdure.workers.consumer.consumer:Consumer",
        worker_pool="threads",
        worker_concurrency=CONCURRENCY,
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,  # `perdure.workers.consumer.room` limits consumption instead
        worker_send_task_events=False,  # events take a sixth of a worker's time; Flower enables them while it runs
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # If Redis refuses a command, the worker reconnects instead of ending (`perdure.workers.consumer.broken_keys`).
        broker_channel_error_retry=not is_amqp(where.broker_url),
        broker_pool_limit=16,
        broker_heartbeat=10,
        broker_connection_timeout=wait_s,
        broker_transport_options=transport_options(where.broker_url, wait_s, settings.redis_prefix),
        # With exchanges of their own, these workers do not appear in the `celery inspect`, Flower and gossip of other
        # applications on the broker.
        control_exchange=f"{settings.redis_prefix}celery",
        event_exchange=f"{settings.redis_prefix}celeryev",
        redis_socket_timeout=_WORKER_WAIT_S,
        redis_socket_connect_timeout=_WORKER_WAIT_S,
        redis_retry_on_timeout=True,
        redis_backend_health_check_interval=int(_WORKER_WAIT_S),
    )
    import_modules.connect(lambda **_: load_tasks(app), sender=app, weak=False)
    return app


def connected_app(name: str, where: Addresses, **options: Any) -> Celery:
    """An application with the broker and the result backend at `where`, and their TLS options."""
    (broker_url, broker_tls), (backend_url, backend_tls) = map(tls.divided, (where.broker_url, where.redis_url))
    app = IsolatedApp(name, broker=broker_url, backend=backend_url, **options)
    app.conf.update(broker_use_ssl=broker_tls, redis_backend_use_ssl=backend_tls)
    return app


def load_tasks(app: Celery) -> None:
    """Register perdure's tasks with `app`.

    Raises:
        SettingsError: `app` has a task of its own with the name of one of perdure's tasks.
    """
    from perdure.tasks.task import register  # noqa: PLC0415 (imports the domain, which publishers do not need)

    for module in TASK_MODULES:
        import_module(module)
    register(app)


def registered() -> frozenset[str]:
    """The names of perdure's tasks and of Celery's built-in tasks. Imports all task modules."""
    app = Celery("perdure", set_as_current=False)
    load_tasks(app)
    return frozenset(app.tasks)


def transport_options(broker_url: str, wait_s: float, prefix: str) -> dict[str, Any]:
    """The options of kombu's transport. Connecting, reading and writing time out after `wait_s` seconds.

    On Redis, the keys of unacknowledged messages begin with `prefix`. All applications on a Redis database share
    kombu's default keys. Under these keys, perdure's short visibility timeout would redeliver the running and postponed
    tasks of other applications.
    """
    if is_amqp(broker_url):
        return {"confirm_publish": True, "connect_timeout": wait_s, "read_timeout": wait_s, "write_timeout": wait_s}
    return {
        # All ten levels, which include the four levels of publishers with kombu's defaults.
        "priority_steps": list(range(_PRIORITIES)),
        "socket_timeout": wait_s,
        "socket_connect_timeout": wait_s,
        "health_check_interval": int(_WORKER_WAIT_S),
        # After this time, kombu redelivers the unacknowledged submissions of a killed worker. If a wake-up waits longer
        # than this time in a busy worker, kombu redelivers the wake-up, too, which is harmless.
        "visibility_timeout": REDELIVER_S,
        "unacked_key": f"{prefix}unacked",
        "unacked_index_key": f"{prefix}unacked_index",
        "unacked_mutex_key": f"{prefix}unacked_mutex",
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }


def broker_priority(broker_url: str, priority: int) -> int:
    """Translate perdure's `priority`, which is 0 to 9 (highest), to the broker's value.

    RabbitMQ delivers priority 9 first. On Redis each priority level is a list, and consumers read level 0 first.
    Consumers with kombu's defaults read only the levels 0, 3, 6 and 9, so perdure publishes to these four. perdure's
    own workers read all ten.
    """
    if is_amqp(broker_url):
        return priority
    return (_PRIORITIES - 1 - priority) // 3 * 3


def restored_level(level: int) -> int:
    """The priority level on Redis to which perdure returns a message that kombu would return to `level`.

    kombu computes `level` from the message's priority and the `priority_steps` of the process that returns the message.
    A publisher with kombu's defaults puts a message of priority 4 on level 3. With the ten steps of perdure's workers,
    kombu would return this message to level 4, which no consumer with kombu's defaults reads.
    """
    return level // 3 * 3


def is_amqp(broker_url: str) -> bool:
    return broker_url.startswith(("amqp", "pyamqp"))


def queues(broker_url: str) -> list[Queue]:
    return [_queue(name, broker_url) for name in QUEUES]


def routes(broker_url: str) -> dict[str, dict[str, Any]]:
    """The queue and priority of perdure's tasks, by the task names and globs in `ROUTES`."""
    return {
        task: {"queue": queue, "priority": broker_priority(broker_url, PRIORITIES[queue])}
        for task, queue in ROUTES.items()
    }


def _queue(name: str, broker_url: str) -> Queue:
    # RabbitMQ refuses a declaration whose arguments differ from those of the existing queue. Publishers of other
    # applications declare queues without arguments. They do not publish to `turns`, so only `turns` has an argument.
    ranked = name == "turns" and is_amqp(broker_url)
    arguments = {"x-max-priority": _PRIORITIES - 1} if ranked else None
    return Queue(name, Exchange(name), routing_key=name, queue_arguments=arguments)
