"""A task message in a worker: its arguments are masked, and its linked tasks are checked before the task runs.

Publishers other than perdure send `argsrepr` and `kwargsrepr` in full, and `celery inspect` reports the arguments
themselves. So the worker masks the arguments of every message in events, log lines and replies to `celery inspect`.

A body is decoded once, as the consumer accepts it: JSON, whatever the application accepts. Celery would decode it again
in the pool, with the application's `accept_content`.

Celery reads the tasks that a message links to (`callbacks`, `errbacks`, `chain`, `chord`) only when the task has run.
An error there escapes Celery's handling, and the message would be neither acknowledged nor refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.worker.request import Request as CelerysRequest

from perdure.tasks.arguments import described


class Request(CelerysRequest):  # type: ignore[misc]  # celery carries no types
    """Celery's request with masked arguments. `PerdureTask.Request` names this class."""

    def __init__(self, message: Any, **options: Any) -> None:
        """Read the message.

        Raises:
            InvalidTaskError: a linked task is malformed.
        """
        if not options.get("decoded"):
            options |= {"body": message.payload, "decoded": True}
        super().__init__(message, **options)
        _, _, embedded = self._payload
        for source in (self._request_dict, embedded if isinstance(embedded, Mapping) else {}):
            _check_links(source)
        self.name = self._type  # instead of the publisher's `shadow`, which may be any text
        shown = described(self._args, self._kwargs)
        self._argsrepr, self._kwargsrepr = shown["argsrepr"], shown["kwargsrepr"]
        self._request_dict.update(shown, shadow=None)

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002, FBT001, FBT002 (Celery's signature)
        """The masked description of the task in replies to `celery inspect active` and similar commands."""
        hidden: dict[str, Any] = super().info(safe=True)
        return hidden


def _check_links(source: Mapping[str, Any]) -> None:
    for name in ("callbacks", "errbacks", "chain"):
        links = source.get(name)
        if links is not None and not (isinstance(links, list | tuple) and all(map(_is_signature, links))):
            raise InvalidTaskError(f"{name} is not a list of signatures")
    if (chord := source.get("chord")) is not None and not _is_signature(chord):
        raise InvalidTaskError("chord is not a signature")


def _is_signature(link: object) -> bool:
    """Whether Celery can make a signature of `link`: a task's name, with arguments and options of the right types."""
    if not isinstance(link, Mapping) or not isinstance(link.get("task"), str) or not link["task"]:
        return False
    args, kwargs, options = (link.get(name) for name in ("args", "kwargs", "options"))
    return (
        (args is None or isinstance(args, list | tuple))
        and (kwargs is None or isinstance(kwargs, Mapping))
        and (options is None or isinstance(options, Mapping))
    )
