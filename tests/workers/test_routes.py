"""Tasks that are sent by name are routed to their queues."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import redis as redis_py

from perdure.assembly import Addresses
from perdure.network.queues import QUEUES
from perdure.servers import redis
from perdure.settings import Settings
from perdure.workers.celery_application import ROUTES, make_app, registered

PUBLIC_TASKS = {
    "turns.submit": "ingress",
    "turns.run": "turns",
    "deliveries.send": "deliveries",
    "sessions.end": "sessions",
    "sessions.expire_idle": "sessions",
    "memory.consolidate": "memory",
    "memory.consolidate_session": "memory",
    "memory.decay": "memory",
    "memory.refresh_hot": "memory",
    "casebank.prune": "maintenance",
    "casebank.reflect": "maintenance",
    "maintenance.retain": "maintenance",
}


def _own() -> set[str]:
    return {name for name in registered() if not name.startswith(("celery.", "pytest_celery."))}


def test_the_public_tasks_are_registered() -> None:
    """The documented task names stay registered, because other services use them."""
    assert PUBLIC_TASKS.keys() <= _own()


@pytest.mark.parametrize("task", sorted(_own()))
def test_each_task_has_a_route(task: str) -> None:
    """Each task has a route.

    A task without a route would go to the default queue `ingress`, and would delay the acceptance of messages there.
    """
    assert any(fnmatchcase(task, pattern) for pattern in ROUTES)


def test_a_task_that_is_sent_by_name_arrives_in_its_queue(redis_url: str) -> None:
    """A task that is sent by name arrives in its own queue and in no other queue."""
    app = make_app(Settings(_env_file=None), Addresses("postgresql://", redis_url, redis_url))
    client = redis_py.Redis.from_url(redis.client_url(redis_url))
    arrived = {}
    for task in PUBLIC_TASKS:
        app.send_task(task, kwargs={})
        arrived[task] = [name for name in QUEUES for key in client.scan_iter(f"{name}*") if client.llen(key)]
        client.delete(*[key for name in QUEUES for key in client.scan_iter(f"{name}*")])
    app.close()
    client.close()

    assert arrived == {task: [queue] for task, queue in PUBLIC_TASKS.items()}
