"""`Process`: the parts that the tasks of a worker process share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from perdure.database.fencing import Fence
from perdure.runtime import Runtime
from perdure.schedule.entry import Entry
from perdure.tasks.metrics import TaskMetrics
from perdure.turns.outbox import Carrier
from perdure.turns.run.runner import Runner

Flusher = Callable[[UUID, Fence], int | None]
"""Writes to PostgreSQL a session's turns that only Redis has; returns the number of entries written.

Returns `None` if the session's next worker must write them: the fence is stale, or a turn must run first.
"""

DELIVERIES = 20
"""The most concurrent deliveries of a process. A receiver that hangs occupies a thread until the timeout."""

ENDINGS = 20
"""The most sessions that a process ends concurrently, so that a hanging summary model does not occupy all threads."""

CONSOLIDATIONS = 8
"""The most sessions that a process consolidates concurrently, in addition to a batch, for the same reason."""


@dataclass(frozen=True)
class Process:
    """The parts of one worker process.

    `carriers` deliver replies, by kind of target. `isolate` runs a session's turns in a child process; see
    `Isolation.run`. `entries` are the schedule's entries, by name. `leaving` is set when the shutdown begins. The
    shutdown calls the `flushers` for each session that the process has held. `deliveries`, `endings` and
    `consolidations` limit concurrent tasks; a task without room returns, and the sweeper publishes it again.
    """

    runtime: Runtime
    runner: Runner
    carriers: Mapping[str, Carrier]
    isolate: Callable[[UUID], bool]
    entries: Mapping[str, Entry] = field(default_factory=dict)
    flushers: Sequence[Flusher] = ()
    leaving: threading.Event = field(default_factory=threading.Event)
    deliveries: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(DELIVERIES))
    endings: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(ENDINGS))
    consolidations: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(CONSOLIDATIONS))
    metrics: TaskMetrics = field(default_factory=TaskMetrics)
