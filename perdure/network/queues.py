"""Names of queues at the broker: perdure's own queues, and the queues that `reply_to` may name.

On Redis, a queue's name is a key. A reply to an arbitrary queue could therefore write to keys of kombu, of Celery's
results or of perdure. `PERDURE_REPLY_TASKS` lists the allowed tasks and their queues. `Settings` rejects an entry with
a reserved queue. `reply_queue` checks a reply's task and queue when a message is accepted, and again when the reply is
delivered.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

QUEUES = ("ingress", "turns", "deliveries", "sessions", "memory", "maintenance")
"""The queues that perdure's workers consume."""

CELERYS_OWN_QUEUE = "celery"
"""The default queue of a Celery worker."""

_MAX_NAME = 200
_RESERVED = (
    "unacked",  # kombu's unacknowledged messages, on Redis
    "_kombu.",  # kombu's bindings
    "celery-task-meta-", "celery-taskset-meta-", "chord-unlock-",  # Celery's results, with the default key prefixes
    "celeryev",  # queues of Celery's events
    "amq.",  # RabbitMQ's own queues
)  # fmt: skip
_CONTROL = ".pidbox"
"""The suffix of the names of Celery's control queues."""


@dataclass(frozen=True, slots=True)
class ReplyTask:
    """An entry of `PERDURE_REPLY_TASKS`. `task` is a glob of task names. `queue` is the queue of these tasks."""

    task: str
    queue: str

    @classmethod
    def parse(cls, entry: str, prefix: str) -> ReplyTask:
        """Parse the entry `TASK` or `TASK@QUEUE`; `prefix` is `PERDURE_REDIS_PREFIX`.

        Raises:
            ValueError: the task or the queue is empty, or the queue is not allowed. The message states the reason.
        """
        task, at, queue = entry.partition("@")
        if not task or (at and not queue):
            raise ValueError("accepted: TASK or TASK@QUEUE")
        queue = queue or CELERYS_OWN_QUEUE
        if (problem := _problem(queue, prefix)) is not None:
            raise ValueError(f"the queue {queue!r} {problem}; accepted: TASK or TASK@QUEUE, a queue of an application")
        return cls(task, queue)


def reply_queue(entries: Iterable[ReplyTask], task: str, queue: str | None) -> str | None:
    """The queue for a reply to `task`; `None` if no entry allows the reply.

    If `queue` is given, an entry must allow this queue for `task`. If `queue` is `None`, returns the queue of the first
    entry that matches `task`.
    """
    allowed = [entry.queue for entry in entries if fnmatchcase(task, entry.task)]
    return next((each for each in allowed if queue is None or each == queue), None)


def _problem(queue: str, prefix: str) -> str | None:
    """The reason why replies to `queue` are not allowed; `None` if they are allowed."""
    if len(queue) > _MAX_NAME:
        return f"has more than {_MAX_NAME} characters"
    if any(unicodedata.category(character)[0] == "C" for character in queue):
        return "has a control character"
    if queue in QUEUES:
        return "is perdure's own"
    if queue.startswith(prefix):
        return f"begins with PERDURE_REDIS_PREFIX ({prefix!r}), as perdure's own keys do"
    if queue.startswith(_RESERVED) or queue.endswith(_CONTROL):
        return "is reserved by Celery, kombu or the broker"
    return None
