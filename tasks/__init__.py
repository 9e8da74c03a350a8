"""The Celery tasks: their base classes, and one module of tasks for each domain.

A task takes ids, calls one function of its domain, and handles the function's outcome. Wake-ups are hints: a worker
acknowledges a wake-up on delivery, and the sweeper issues lost wake-ups again.
"""

from contextvars import ContextVar

current_task: ContextVar[str] = ContextVar("current_task", default="-")
"""The task that this thread runs, as `NAME[ID]`, for the log; `-` outside a task."""
