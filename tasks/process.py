"""What the tasks of a worker process share, and how a task finds it."""

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
"""Writes a session's turns that only Redis has to PostgreSQL; their number.

`None` if that is left to the session's next worker: the token is stale, or a turn comes first.
"""

DELIVERIES = 20
"""Deliveries that one process attempts at once. A receiver that hangs holds a thread for its timeout."""

ENDINGS = 20
"""Sessions that one process ends at once. A summary model that hangs must leave threads for turns."""

CONSOLIDATIONS = 8
"""Sessions that one process draws memories from at once, beside a batch: for the same reason."""


@dataclass(frozen=True)
class Process:
    """One worker process: its runtime, its runner, its ways to receivers.

    `isolate` runs a session's turn in a process of its own, and returns when that has ended;
    False if there was no room for it. `entries` are the schedule's, by name. `flushers` are
    called on the way out, for each session that was worked on here; `leaving` is set when that
    begins. `deliveries`, `endings` and `consolidations` bound how many of each run at once; a task that
    finds no room returns, and the sweeper publishes its wake-up again.
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
