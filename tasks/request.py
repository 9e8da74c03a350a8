"""Masks the arguments of a task message in the worker's events, log lines and replies to `celery inspect`.

Publishers other than perdure send `argsrepr` and `kwargsrepr` in full, and `celery inspect` reports the arguments
themselves. So the worker masks the arguments of every message.
"""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request as CelerysRequest

from perdure.tasks.arguments import described


class Request(CelerysRequest):  # type: ignore[misc]  # celery carries no types
    """Celery's request with masked arguments. `PerdureTask.Request` names this class."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = self._type  # instead of the publisher's `shadow`, which may be any text
        shown = described(self._args, self._kwargs)
        self._argsrepr, self._kwargsrepr = shown["argsrepr"], shown["kwargsrepr"]
        self._request_dict.update(shown, shadow=None)

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002, FBT001, FBT002 (Celery's signature)
        """The masked description of the task in replies to `celery inspect active` and similar commands."""
        hidden: dict[str, Any] = super().info(safe=True)
        return hidden
