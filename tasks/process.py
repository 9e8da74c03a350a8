"""`Process`: the parts that the tasks of a worker process share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from perdure.database.fencing import Fence
from perdure.runtime import Runtime
from perdure.tasks.metrics import TaskMetrics
from perdure.tasks.shares import DeliveryShares
from perdure.timetable.entry import ScheduleEntry
from perdure.turns.outbox import Carrier
from perdure.turns.run.child_watch import ChildEnd
from perdure.turns.run.loop import Runner

Flusher = Callable[[UUID, Fence], int | None]
"""Writes to PostgreSQL a session's turns that only Redis has; returns the number of turns written.

Returns `None` if the session's next worker must write the turns: the fence is stale, or a turn must run first.
"""

DELIVERIES = 20
"""The maximum number of concurrent deliveries in a process.

A receiver that hangs occupies a thread until the timeout. Deliveries to one service (a URL's host, a channel, or the
queue of a task) take at most half of the number, and so do the deliveries of one user, who may name many hosts.
"""

ENDINGS = 20
"""The maximum number of sessions that a process ends concurrently.

The limit leaves threads for other tasks while the summary model hangs.
"""

CONSOLIDATIONS = 8
"""The maximum number of concurrent `memory.consolidate_session` tasks in a process.

The limit leaves threads for other tasks while the summary model hangs.
"""


@dataclass(frozen=True)
class Process:
    """The parts of one worker process.

    `deliveries` (by service), `user_deliveries` (by user), `endings` and `consolidations` limit concurrent tasks. A
    task over the limit returns at once, and the sweeper publishes the task again.

    Attributes:
        carriers: The carriers of replies, by kind of target.
        isolate: Runs a session's turns in a child process; see `Isolation.run`.
        entries: The schedule's entries, by name.
        flushers: The functions that a flush calls for each session that the process has held.
        leaving: Set when the shutdown begins.
    """

    runtime: Runtime
    runner: Runner
    carriers: Mapping[str, Carrier]
    isolate: Callable[[UUID], ChildEnd | None]
    entries: Mapping[str, ScheduleEntry] = field(default_factory=dict)
    flushers: Sequence[Flusher] = ()
    leaving: threading.Event = field(default_factory=threading.Event)
    deliveries: DeliveryShares = field(default_factory=lambda: DeliveryShares(DELIVERIES))
    user_deliveries: DeliveryShares = field(default_factory=lambda: DeliveryShares(DELIVERIES))
    endings: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(ENDINGS))
    consolidations: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(CONSOLIDATIONS))
    metrics: TaskMetrics = field(default_factory=TaskMetrics)
