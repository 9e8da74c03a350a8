"""Celery without another library: the turn is a task, which repeats it from its start.

As "Tasks" and "Using Redis" of Celery's documentation describe it: `acks_late`, `task_reject_on_worker_lost` and a
visibility timeout, after which a message that no worker has acknowledged is delivered again. The timeout must be longer
than every task. Its default is an hour, which is longer than the time that the benchmark waits; here, it is the lease
of Absurd, two minutes. `unacked_restore_throttle` of kombu's documentation makes kombu look for such messages every
10 s instead of every 100 s.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from benchmarks.crashes import script

REDIS = "CRASHES_REDIS"
"""The environment variable with the address of Redis."""
VISIBILITY_S = 120


def application(redis: str) -> Celery:
    """The application with its task."""
    made = Celery("crashes", broker=redis, backend=redis)
    made.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_transport_options={"visibility_timeout": VISIBILITY_S, "unacked_restore_throttle": 1},
    )
    made.task(answer, name=script.TASK, bind=True)
    return made


def answer(self: Any, turn: str) -> str:
    """Run a turn."""
    key = self.request.id
    text, result = None, None
    while text is None:
        text = script.ask(turn, result)
        result = script.order(turn, f"{key}:{script.CALL_ID}") if text is None else None
    script.reply(turn, text, key)
    return text


if REDIS in os.environ:
    app = application(os.environ[REDIS])
