"""Replaces the tasks of Celery tools, and what runs external tools, by functions in a test.

A function runs when the turn waits for its call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from perdure.text.untrusted import error_summary
from perdure.tools.awaited.port import TaskCall, TaskEnded, TaskSent

Tasks = Mapping[str, Callable[..., Any]]
"""Functions that replace Celery tasks, by the task's name, and external tools, by the tool's name."""


class InlineCalls:
    """A `perdure.tools.awaited.port.TaskCalls` that stores each task until `run` runs it in this process."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._sent: dict[UUID, TaskCall] = {}

    def send(self, call: TaskCall) -> TaskSent:
        self._sent[call.task_id] = call
        return TaskSent.YES

    def ask(self, task_id: UUID) -> TaskEnded | None:
        """Return `None`: there is no result backend."""
        del task_id
        return None

    def revoke(self, task_ids: Sequence[UUID]) -> bool:
        """Remove the stored tasks."""
        for task_id in task_ids:
            self._sent.pop(task_id, None)
        return True

    def run(self) -> tuple[TaskCall, TaskEnded] | None:
        """Run the next stored task that has a function, and return the task and its outcome.

        Returns `None` if no stored task has a function.
        """
        call = next((each for each in self._sent.values() if self.has(each.task)), None)
        if call is None:
            return None
        del self._sent[call.task_id]
        return call, self.call(call.task, call.arguments)

    def has(self, name: str) -> bool:
        """Whether a function replaces the task or the tool `name`."""
        return name in self._tasks

    def call(self, name: str, arguments: Mapping[str, Any]) -> TaskEnded:
        """Run the function that replaces the task or the tool `name`, and return its outcome."""
        try:
            return TaskEnded(failed=False, value=self._tasks[name](**arguments))
        except Exception as error:  # noqa: BLE001 (as a worker records it)
            return TaskEnded(failed=True, value=error_summary(error))
