"""Celery's side of perdure: one task class, thin tasks, one module a domain.

A task takes ids, calls one function of the domain and maps its outcome. Wake-ups are hints:
they are acknowledged when they arrive, and the sweeper issues again what is lost.
"""

from contextvars import ContextVar

current_task: ContextVar[str] = ContextVar("current_task", default="-")
"""The task that this thread runs, as `NAME[ID]`, for the log; `-` outside of tasks."""
