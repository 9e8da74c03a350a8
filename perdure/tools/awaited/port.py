"""The interface to the task queue of Celery tools. `perdure.workers.publish.calls` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A task to send: its id, its keyword arguments, and the seconds after which no worker may begin it.

    `queue` is `None` for the queue that the application's routes choose. `effect_id` is the call's, and the task's own
    id unless the task is a `part` of it.
    """

    task_id: UUID
    task: str
    arguments: Mapping[str, Any]
    queue: str | None
    expires_s: float
    effect_id: UUID
    part: int | None = None


class Sent(Enum):
    """Whether the broker has a task after an attempt to send it."""

    YES = auto()
    NO = auto()
    """The broker cannot be reached, and does not have the task."""
    MAYBE = auto()
    """The broker may or may not have the task."""


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """The task returned `value`, or failed; then `value` is the message of its error."""

    failed: bool
    value: Any


@dataclass(frozen=True, slots=True)
class TaskRuns:
    """The task has begun. `progress` is what it last passed to `update_state`, `None` if nothing."""

    progress: Any = None


class TaskCalls(Protocol):
    """Sends tasks, asks the result backend about them, and revokes them. No method raises; each is bounded in time."""

    def send(self, call: TaskCall) -> Sent:
        """Publish the task, with a link that returns its result to `perdure.turns.calls.awaited.finish`."""
        ...

    def ask(self, task_id: UUID) -> TaskEnded | TaskRuns | None:
        """The task's state in the result backend; `None` if the backend has none, or cannot be reached."""
        ...

    def revoke(self, task_ids: Sequence[UUID]) -> bool:
        """Have the workers discard these tasks; False if the broker cannot be reached. One that runs continues."""
        ...
