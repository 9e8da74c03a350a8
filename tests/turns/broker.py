"""An in-memory task queue for tests of turns that wait for tasks."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from perdure.tools.awaited.port import TaskCall, TaskEnded, TaskRuns, TaskSent


class Broker:
    """An in-memory task queue that records sent and revoked tasks.

    `states` stands for the queue's result backend. Tests write the tasks' states to it.
    """

    def __init__(self) -> None:
        self.sent: list[TaskCall] = []
        self.revoked: list[UUID] = []
        self.states: dict[UUID, TaskEnded | TaskRuns] = {}
        self.outcome = TaskSent.YES

    def send(self, call: TaskCall) -> TaskSent:
        """Record the task unless the broker is unavailable."""
        if self.outcome is not TaskSent.NO:
            self.sent.append(call)
        return self.outcome

    def ask(self, task_id: UUID) -> TaskEnded | TaskRuns | None:
        """The task's entry in `states`, or `None`."""
        return self.states.get(task_id)

    def revoke(self, task_ids: Sequence[UUID]) -> bool:
        """Record the ids unless the broker is unavailable."""
        if self.outcome is TaskSent.NO:
            return False
        self.revoked += task_ids
        return True
