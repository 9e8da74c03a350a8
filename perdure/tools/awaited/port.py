"""The interface that sends, queries and revokes the tasks of Celery tools.

`perdure.workers.publish.calls` implements the interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A task to send. `arguments` are the task's keyword arguments.

    A worker discards the task if more than `expires_s` seconds have passed since the task was sent. If `queue` is
    `None`, the application's routes choose the queue. `effect_id` is the id of the tool call. If the call has a single
    task, `task_id` equals `effect_id`. If the call has several tasks, each task has its own `task_id`, and `part` is
    its index.
    """

    task_id: UUID
    task: str
    arguments: Mapping[str, Any]
    queue: str | None
    expires_s: float
    effect_id: UUID
    part: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of the task's message."""


class TaskSent(Enum):
    """Whether the broker has a task, after an attempt to send it."""

    YES = auto()
    NO = auto()
    """The broker does not have the task."""
    MAYBE = auto()
    """The broker may or may not have the task."""


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """The outcome of an ended task. `value` is the task's return value, or the error's message if the task failed."""

    failed: bool
    value: Any


@dataclass(frozen=True, slots=True)
class TaskRuns:
    """The state of a running task. `progress` is the value that the task last passed to `update_state`, or `None`."""

    progress: Any = None


class TaskCalls(Protocol):
    """Sends tasks, reads their state from the result backend, and revokes them. No method raises or blocks for long."""

    def send(self, call: TaskCall) -> TaskSent:
        """Publish the task, with Celery links that pass its result or error to `perdure.turns.calls.awaited.finish`."""
        ...

    def ask(self, task_id: UUID) -> TaskEnded | TaskRuns | None:
        """The task's state in the result backend; `None` if the backend has no state or cannot be reached."""
        ...

    def revoke(self, task_ids: Sequence[UUID]) -> bool:
        """Make the workers discard the tasks that have not begun; returns False if the broker cannot be reached."""
        ...
