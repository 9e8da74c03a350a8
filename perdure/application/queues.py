"""Adds perdure's queues and routes to the Celery application of another project, and makes publishers for its broker.

Celery creates an application's queues and router on first use. perdure adds its queues and routes at that time, so the
application may be configured after `perdure.install`. A worker consumes perdure's queues only if `-Q` names them.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from celery import Celery
from celery.app.amqp import AMQP, Queues
from celery.utils.imports import symbol_by_name
from kombu import Connection, Queue

from perdure.errors import SettingsError
from perdure.network.queues import QUEUES
from perdure.network.tls import joined
from perdure.workers.celery_application import TASKS, is_amqp, queues, routes
from perdure.workers.pools import IsolatedAMQP, IsolatedApp

_WAIT_S = 0.5
"""Seconds that a publisher waits for the broker."""

_COPIED = (
    "broker_use_ssl",
    "broker_login_method",
    "broker_failover_strategy",
    "broker_heartbeat",
    "task_default_queue",
    "task_default_exchange",
    "task_default_exchange_type",
    "task_default_routing_key",
)
"""The settings that `publisher` copies from the application."""


def broker_url(app: Celery) -> str:
    """The complete URL of the application's broker, with its TLS options. If there are several URLs, the first one."""
    connection: Connection = app.connection_for_write()
    return joined(connection.as_uri(include_password=True), connection.ssl)


def add_queues(app: Celery) -> None:
    """Add perdure's queues and routes to those of `app`."""
    given: type[AMQP] = symbol_by_name(app.amqp_cls)

    class WithPerdure(given):  # type: ignore[misc]  # the application may have a class of its own
        """The application's AMQP class, extended by perdure's queues and routes."""

        queues_cls = type("Queues", (_KeepsPerdures, given.queues_cls), {})

        def Queues(self, *args: Any, **options: Any) -> Any:  # noqa: N802 (Celery's name)
            """Return the application's and perdure's queues. A worker without `-Q` consumes the application's only."""
            made = super().Queues(*args, **options)
            for each in queues(broker_url(self.app)):
                if each.name in made:
                    raise SettingsError(
                        f"the application {self.app.main!r} has a queue {each.name!r}, which is a name of perdure's: "
                        "rename your queue"
                    )
                made[each.name] = each
            return made

        def TaskConsumer(self, channel: Any, queues: Any = None, accept: Any = None, **options: Any) -> Any:  # noqa: N802
            """Return a worker's consumer. If the worker consumes perdure's queues, add JSON to `accept`."""
            accept = self.app.conf.accept_content if accept is None else accept
            if accept is not None and consumed(self.app):
                accept = {*accept, "json"}
            return super().TaskConsumer(channel, queues, accept, **options)

        def Router(self, *args: Any, **options: Any) -> Any:  # noqa: N802 (as above)
            """Return the application's router, extended by the routes of perdure's tasks."""
            made = super().Router(*args, **options)
            made.routes = [_Route(self.app), *made.routes]
            return made

    app.amqp_cls = WithPerdure
    vars(app).pop("amqp", None)  # an instance from earlier use lacks perdure's queues


class _KeepsPerdures(Queues):  # type: ignore[misc]  # celery carries no types
    """Queues of which perdure's keep their arguments, also when a worker selects them again.

    Celery would give them the application's `x-max-priority`, and RabbitMQ would refuse the declaration.
    """

    def __setitem__(self, name: str, queue: Queue) -> None:
        if name in QUEUES:
            dict.__setitem__(self, name, queue)
        else:
            super().__setitem__(name, queue)


class _Route:
    """Routes perdure's tasks. Takes precedence over all routes of the application, even a route for `*`."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def __call__(self, name: str, *_: Any, **__: Any) -> dict[str, Any] | None:
        if name not in TASKS:
            return None
        found = next(route for task, route in routes(broker_url(self._app)).items() if fnmatchcase(name, task))
        return {**found, "serializer": "json"}  # perdure's own workers may refuse the application's serializer


def publisher(app: Celery) -> Celery:
    """Make an application that publishes to the broker of `app`, with the same transport options but short timeouts."""
    url = broker_url(app)
    made = IsolatedApp("perdure", broker=app.conf.broker_write_url or app.conf.broker_url or url, set_as_current=False)
    waits = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), _WAIT_S)
    if is_amqp(url):
        waits = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), _WAIT_S)

    class WithQueues(IsolatedAMQP):
        """perdure's connections, and the application's queues: also those that `app` makes for names that it lacks."""

        def Queues(self, *_: Any, **__: Any) -> Any:  # noqa: N802 (Celery's name)
            """Return the queues of `app`."""
            return app.amqp.queues

    made.amqp_cls = WithQueues
    made.conf.update(
        {name: app.conf[name] for name in _COPIED},
        task_routes=routes(url),
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        broker_connection_timeout=_WAIT_S,
        broker_pool_limit=16,
        broker_transport_options={**app.conf.broker_transport_options, **waits},
    )
    return made


def consumed(app: Celery) -> set[str]:
    return set(QUEUES) & set(app.amqp.queues.consume_from)
