"""The task that this thread runs, for the log. A module of its own, since every process imports it."""

from contextvars import ContextVar

current_task: ContextVar[str] = ContextVar("current_task", default="-")
"""`NAME[ID]` of the task, `-` outside of tasks."""
