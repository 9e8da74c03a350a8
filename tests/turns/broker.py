"""A task queue in memory, for turns that wait for tasks."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from perdure.tools.awaited.port import Sent, TaskCall, TaskEnded, TaskRuns


class Broker:
    """A task queue in memory: what was sent and revoked, and what the result backend answers."""

    def __init__(self) -> None:
        self.sent: list[TaskCall] = []
        self.revoked: list[UUID] = []
        self.states: dict[UUID, TaskEnded | TaskRuns] = {}
        self.outcome = Sent.YES

    def send(self, call: TaskCall) -> Sent:
        """Record the task unless the broker is unavailable."""
        if self.outcome is not Sent.NO:
            self.sent.append(call)
        return self.outcome

    def ask(self, task_id: UUID) -> TaskEnded | TaskRuns | None:
        """The state that the test has set."""
        return self.states.get(task_id)

    def revoke(self, task_ids: Sequence[UUID]) -> bool:
        """Keep the ids unless the broker is unavailable."""
        if self.outcome is Sent.NO:
            return False
        self.revoked += task_ids
        return True
