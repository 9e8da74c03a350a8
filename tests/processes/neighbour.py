"""An ordinary Celery application that shares perdure's Redis database: `celery -A tests.processes.neighbour worker`.

It uses Celery's defaults. The messages of some tasks stay unacknowledged for a long time, because the tasks have late
acknowledgement or a countdown. Each execution appends a line to a file in the test's directory.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from celery import Celery

from tests.processes.faults import wait_until

QUEUE = "neighbour"

_DIRECTORY = Path(os.environ.get("NEIGHBOUR_DIRECTORY", "."))
_URL = os.environ.get("NEIGHBOUR_REDIS_URL", "memory://")

app = Celery("neighbour", broker=_URL, backend=_URL, set_as_current=False)
app.conf.update(
    task_default_queue=QUEUE, worker_pool="threads", worker_concurrency=8, broker_connection_retry_on_startup=True
)


@app.task(name="neighbour.late", acks_late=True, shared=False)  # type: ignore[untyped-decorator]  # celery carries no types
def late() -> None:
    """Run until the test opens the gate. The task is acknowledged only after its end."""
    _note("late")
    wait_until((_DIRECTORY / "gate").exists, "the gate is open", 60)


@app.task(name="neighbour.quick", shared=False)  # type: ignore[untyped-decorator]  # celery carries no types
def quick() -> None:
    """Return at once."""
    _note("quick")


@app.task(name="neighbour.timed", acks_late=True, shared=False)  # type: ignore[untyped-decorator]  # as above
def timed(name: str, seconds: float) -> None:
    """Run for `seconds`. The task is acknowledged only after its end."""
    _note(name)
    threading.Event().wait(seconds)


@app.task(name="neighbour.named", shared=False)  # type: ignore[untyped-decorator]  # as above
def named(name: str) -> None:
    """Return at once."""
    _note(name)


def _note(line: str) -> None:
    with (_DIRECTORY / "runs").open("a") as runs:
        runs.write(f"{line}\n")
