"""The boot step that lets an application's worker run perdure's tasks, if the worker consumes one of perdure's queues.

Other workers of the application skip the step, so perdure opens no connection and starts no thread in them.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from celery import Celery, signals
from celery.utils.imports import symbol_by_name
from celery.worker import state

from perdure.application.consumer import InstalledConsumer
from perdure.application.queues import broker_url, consumed, publisher
from perdure.assembly import Addresses, check, database_address, redis_address
from perdure.settings import BROKERS, Settings
from perdure.tasks.task import PerdureTask
from perdure.workers import control as _control  # noqa: F401 (registers the command `inspect perdure`)
from perdure.workers.celery_application import load_tasks
from perdure.workers.consumer import pause
from perdure.workers.isolated.child import APPLICATION
from perdure.workers.lifecycle import Lifecycle, or_exit
from perdure.workers.publish.calls import CeleryCalls
from perdure.workers.publish.wake import CeleryWaker
from perdure.workers.threads import require_threads


class InstalledStep(pause.PauseStep):
    """perdure's boot step in an application's worker."""

    def include_if(self, worker: Any) -> bool:
        return bool(consumed(worker.app))

    def create(self, worker: Any) -> pause.PauseStep:
        """Check the worker's pool and the settings, start a `Lifecycle`, and install perdure's consumer."""
        queues = ",".join(sorted(consumed(worker.app)))
        or_exit(partial(require_threads, worker, f", or without the queues {queues}"))
        or_exit(partial(self._begin, worker))
        given = symbol_by_name(worker.consumer_cls)
        worker.consumer_cls = type("Consumer", (InstalledConsumer, given), {})
        return super().create(worker)

    def _begin(self, worker: Any) -> None:
        app, settings = worker.app, worker.app.perdure_settings
        check(settings)
        load_tasks(app)
        where = addresses(app, settings)
        waker = partial(CeleryWaker, settings, where, publisher(app))
        environment = {APPLICATION: _path_of(app) or ""}
        if where.broker_url.startswith(BROKERS):
            environment["PERDURE_BROKER_URL"] = where.broker_url
        calls = partial(CeleryCalls, app, owned=False)
        lifecycle = Lifecycle(
            app, settings, where, waker=waker, calls=calls, others=_running_of_application, environment=environment
        )
        self._lifecycle = app.perdure = lifecycle
        lifecycle.check()
        lifecycle.start()
        _follow(worker, lifecycle)


def addresses(app: Any, settings: Settings) -> Addresses:
    return Addresses(database_address(settings), redis_address(settings), broker_url(app))


def _follow(worker: Any, lifecycle: Lifecycle) -> None:
    """Connect `lifecycle` to the signals of `worker`."""

    def ready(sender: Any, **_: Any) -> None:
        if sender.controller is worker:
            or_exit(partial(lifecycle.watch, worker.hostname))

    def shutting_down(sender: Any, **_: Any) -> None:
        if sender == worker.hostname:
            lifecycle.request_shutdown()

    def shutdown(sender: Any, **_: Any) -> None:
        if sender is worker:
            lifecycle.close()

    # `weak=False`: Celery would drop these receivers, which nothing else references.
    signals.worker_ready.connect(ready, weak=False)
    signals.worker_shutting_down.connect(shutting_down, weak=False)
    signals.worker_shutdown.connect(shutdown, weak=False)


def _running_of_application() -> int:
    return sum(not isinstance(request.task, PerdureTask) for request in list(state.active_requests))


def _path_of(app: Celery) -> str | None:
    """The path `module:attribute` from which another process can import `app`; `None` if no module has `app`."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is app and name != "__main__":
                return f"{name}:{attribute}"
    return None
