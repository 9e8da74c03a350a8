"""A program that installs perdure in its own Celery application: `celery -A tests.processes.shop worker`.

The program configures the application after `install`, with settings that could harm perdure's tasks: late
acknowledgement, pickle, a route and a rate limit for every task, no results, a prefetch multiplier, and its own beat
schedule.
"""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery

import perdure
from tests.processes.faults import done, wait_until

QUEUE = "shop"
PERDURES = "turns,ingress,deliveries,sessions,memory,maintenance"

_DIRECTORY = Path(os.environ.get("NEIGHBOUR_DIRECTORY", "."))

app = Celery("shop", set_as_current=False)
perdure.install(app)
perdure.install(app)
app.config_from_object(
    {
        "broker_url": os.environ.get("NEIGHBOUR_REDIS_URL", "memory://"),
        "task_default_queue": QUEUE,
        "task_routes": {"*": {"queue": QUEUE}},
        "task_acks_late": True,
        "task_serializer": "pickle",
        "accept_content": os.environ.get("SHOP_ACCEPTS", "pickle,json").split(","),
        "task_queue_max_priority": 10,
        "task_annotations": {"*": {"rate_limit": "100/s", "ignore_result": True}},
        "worker_prefetch_multiplier": 4,
        "beat_schedule": {"own": {"task": "shop.quick", "schedule": 3600.0}},
        "broker_connection_retry_on_startup": True,
    }
)


@app.task(name="shop.slow", shared=False)  # type: ignore[untyped-decorator]  # celery carries no types
def slow() -> None:
    """Run until the test opens the gate. The task is acknowledged only after its end."""
    _note("slow")
    wait_until((_DIRECTORY / "gate").exists, "the gate is open", 60)
    _note("slow-ended")


@app.task(name="shop.quick", shared=False)  # type: ignore[untyped-decorator]  # as above
def quick() -> None:
    """Return at once."""
    _note("quick")


@app.task(name="sessions.expired_carts", shared=False)  # type: ignore[untyped-decorator]  # as above
def expired_carts() -> None:
    """A task whose name has the prefix of some of perdure's tasks."""
    _note("expired-carts")


@app.task(name="reports.make", shared=False)  # type: ignore[untyped-decorator]  # as above
def report(note: str) -> str:
    """A task that the agent calls as a tool."""
    _note("report")
    return done("report", note)


def _note(line: str) -> None:
    with (_DIRECTORY / "runs").open("a") as runs:
        runs.write(f"{line}\n")
