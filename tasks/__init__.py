"""The Celery tasks: one task class, and one module for each domain.

A task takes ids, calls one function of the domain and maps its outcome. Wake-ups are hints: they are acknowledged on
delivery, and the sweeper issues lost ones again.
"""

from contextvars import ContextVar

current_task: ContextVar[str] = ContextVar("current_task", default="-")
"""The task that this thread runs, as `NAME[ID]`, for the log; `-` outside a task."""
