"""An application whose tasks are tools of an agent: `celery -A tests.processes.reports worker`.

It uses Celery's defaults and perdure's broker. Its tasks record their effects with `tests.processes.faults`.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery

from tests.processes.faults import SCENE, Effect, Faults, done, wait_until

URL = "REPORTS_BROKER_URL"
BACKEND = "REPORTS_BACKEND_URL"
"""The environment variables with the URLs of the broker and the result backend."""

STEPS = 8
"""How often the task `reports.step` reports its progress."""

_faults = Faults(Path(os.environ.get(SCENE, ".")))

app = Celery(
    "reports",
    broker=os.environ.get(URL, "memory://"),
    backend=os.environ.get(BACKEND, "cache+memory://"),
    set_as_current=False,
)
app.conf.update(worker_concurrency=2, broker_connection_retry_on_startup=True)


@app.task(name="reports.make", bind=True, acks_late=True, shared=False)  # type: ignore[untyped-decorator]  # celery carries no types
def make(self: Any, note: str) -> str:
    """Make a report, once per task id."""
    if not any(each.effect_id == self.request.id for each in _faults.effects(note)):
        _faults.act(Effect("report", self.request.id, note, os.getpid()))
    return done("report", note)


@app.task(name="reports.charge", bind=True, shared=False)  # type: ignore[untyped-decorator]  # as above
def charge(self: Any, note: str) -> str:
    """Charge at each execution, even if the task id is repeated."""
    _faults.act(Effect("charge", self.request.id, note, os.getpid()))
    return done("charge", note)


@app.task(name="reports.slow", bind=True, shared=False)  # type: ignore[untyped-decorator]  # as above
def slow(self: Any, note: str) -> str:
    """Report progress, and return when the test allows it."""
    self.update_state(state="PROGRESS", meta={"done": 1, "of": 2})
    _faults.act(Effect("slow report", self.request.id, note, os.getpid()))
    _faults.wait_released()
    return done("slow report", note)


@app.task(name="reports.step", bind=True, shared=False)  # type: ignore[untyped-decorator]  # as above
def step(self: Any, note: str) -> str:
    """Report progress, with the time of the report, each time that the test allows it."""
    for number in range(STEPS):
        wait_until(_faults.directory.joinpath(f"step-{number}").exists, "the next step", 60)
        self.update_state(state="PROGRESS", meta={"step": number, "at": time.monotonic()})
    _faults.wait_released()
    return done("stepping", note)


@app.task(name="reports.fail", shared=False)  # type: ignore[untyped-decorator]  # as above
def fail(note: str) -> str:
    """Fail."""
    raise RuntimeError(f"no paper for {note}\nand a second line\x00")


@app.task(name="reports.odd", shared=False)  # type: ignore[untyped-decorator]  # as above
def odd(note: str) -> object:
    """Return an object that cannot be encoded as JSON."""
    return threading.Event()


@app.task(name="reports.silent", bind=True, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]  # as above
def silent(self: Any, note: str) -> str:
    """Return a result that Celery does not store."""
    return done("silent report", note)
