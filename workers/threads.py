"""Refuses Celery's pools, and options of pools, with which perdure's tasks do not run.

perdure's tasks run in threads of the worker's own process, which renews leases, sweeps and shuts down for all of them.
Of the refused options, Celery would ignore some without a message, and fail after the start for others.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from celery.concurrency import ALIASES, get_implementation
from celery.concurrency.thread import TaskPool

from perdure.errors import SettingsError
from perdure.workers.flower.settings import STARTED, command

_THREADS = ("threads", "custom")
"""The names of pools that may have threads. `custom` is the class that `CELERY_CUSTOM_WORKER_POOL` names."""

_OF_CHILDREN = {
    "max_tasks_per_child": "worker_max_tasks_per_child",
    "max_memory_per_child": "worker_max_memory_per_child",
    "time_limit": "task_time_limit",
    "soft_time_limit": "task_soft_time_limit",
}
"""Options that need child processes, and Celery's settings, which an application may have for its other workers."""


def require_named_threads(otherwise: str = "") -> None:
    """Check the pool that the command line of `celery worker` names. `otherwise`: another remedy, for the message.

    Celery replaces the name `prefork` by the configured pool, and imports the libraries of other pools before it makes
    the worker.

    Raises:
        SettingsError: the pool has no threads.
    """
    if command() != "worker" or STARTED.get() is not None:  # `perdure worker` names threads
        return
    name = os.environ.get("CELERY_WORKER_POOL")
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if argument in {"-P", "--pool"}:
            name = following
        elif argument.startswith(("-P", "--pool=")):
            name = argument.removeprefix("--pool=").removeprefix("-P")
    if name == "custom" and not ALIASES["custom"]:
        raise SettingsError("the pool is 'custom', and CELERY_CUSTOM_WORKER_POOL is not set: use `-P threads`")
    if name and name not in _THREADS:
        raise _refused(name, otherwise)


def require_threads(worker: Any, otherwise: str = "") -> None:
    """Check the pool of `worker` and the options of its pool. `otherwise`: another remedy, for the message.

    Raises:
        SettingsError: the worker's tasks do not run in threads, or an option needs child processes.
    """
    require_named_threads(otherwise)
    pool = worker.pool_cls
    if isinstance(pool, str) and pool in ALIASES and pool not in _THREADS:
        raise _refused(pool, otherwise)
    if not issubclass(get_implementation(pool), TaskPool):
        raise _refused(pool.__module__.rpartition(".")[2], otherwise)
    given = ["--autoscale"] if worker.options.get("autoscale") else []
    for name, setting in _OF_CHILDREN.items():
        if (value := getattr(worker, name)) is not None and value != worker.app.conf.get(setting):
            given.append(f"--{name.replace('_', '-')}")
    if given:
        raise SettingsError(
            f"{', '.join(given)} does not apply to threads, which perdure's queues need: start the worker without it"
            f"{otherwise} (-c limits concurrent turns, PERDURE_TURN__TIMEOUT_S the time of a turn)"
        )


def _refused(pool: str, otherwise: str) -> SettingsError:
    return SettingsError(
        f"the pool is {pool!r}, and perdure's queues need threads: start the worker with `-P threads`{otherwise}"
    )
