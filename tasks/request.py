"""A task message in a worker. The worker masks its arguments before it emits an event or a log line.

Other publishers send arguments in full (`argsrepr`, `kwargsrepr`), and `celery inspect` reports the arguments
themselves, so the worker hides them for every publisher.
"""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request as CelerysRequest

from perdure.tasks.arguments import described


class Request(CelerysRequest):  # type: ignore[misc]  # celery carries no types
    """Celery's, for tasks of perdure: each names this class (`PerdureTask.Request`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = self._type  # not the publisher's `shadow`, which may be any text
        shown = described(self._args, self._kwargs)
        self._argsrepr, self._kwargsrepr = shown["argsrepr"], shown["kwargsrepr"]
        self._request_dict.update(shown, shadow=None)

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002, FBT001, FBT002 (Celery's signature)
        """What `celery inspect active` and the like answer."""
        hidden: dict[str, Any] = super().info(safe=True)
        return hidden
