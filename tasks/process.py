"""What the tasks of a worker process share, and how a task finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from perdure.runtime import Runtime
from perdure.slots.entry import Entry
from perdure.turns.outbox import Carrier
from perdure.turns.runner import Runner
from tasks.metrics import TaskMetrics


@dataclass(frozen=True)
class Process:
    """One worker process: its runtime, its runner, its ways to receivers.

    `isolate` runs a session's turn in a process of its own, and returns when that has ended;
    False if there was no room for it. `entries` are the schedule's, by name.
    """

    runtime: Runtime
    runner: Runner
    carriers: Mapping[str, Carrier]
    isolate: Callable[[UUID], bool]
    entries: Mapping[str, Entry] = field(default_factory=dict)
    metrics: TaskMetrics = field(default_factory=TaskMetrics)
