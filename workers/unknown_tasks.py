"""Messages that this worker cannot run, returned to the queue that they came from.

An application on the same broker may have a queue of the same name as one of perdure's. A worker of perdure
then takes the application's tasks, too. Celery would discard them and record a failure; here each is held,
unacknowledged, for `DELAY_S`, and returned. Returning it at once would be a hot loop wherever no consumer of the
application waits: this worker would take it again within a millisecond. Leaving it to the visibility timeout
would cost the application a minute, and RabbitMQ has no such timeout.

Held messages take none of the worker's prefetch slots, up to `HELD` of them; beyond that they do, so a backlog of
another application's cannot fill the worker's memory. A message of a worker that dies is delivered again as
any unacknowledged message is.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

DELAY_S = 1.0
HELD = 100

_REPORT_S = 60.0
"""Seconds between two lines of the log about one queue."""


@dataclass(slots=True)
class _Tally:
    """How many messages of one queue were held since its last line in the log, and when the next may follow."""

    count: int = 0
    report_at: float = 0.0


class UnknownTasks:
    """The messages that one connection of `consumer`, Celery's, holds. Belongs to the consumer's event loop."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._held: dict[int, tuple[Any, Any, bool]] = {}
        self._tallies: dict[str, _Tally] = {}

    def hold(self, message: Any, queue: str, what: str) -> None:
        """Return `message`, which came from `queue`, after `DELAY_S`. `what` it is, for the log."""
        self._report(queue, what)
        extra = len(self._held) < HELD
        if extra:
            self._consumer.qos.increment_eventually()
        timer = self._consumer.timer.call_after(DELAY_S, self._release, (id(message),))
        self._held[id(message)] = (message, timer, extra)

    def release_all(self) -> None:
        """Return all held messages now: the worker stops. If the broker fails, it delivers the rest again by itself."""
        messages = [message for message, _, _ in self._held.values()]
        self.forget()
        for message in messages:
            try:
                message.requeue()
            except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
                log.warning("the broker did not take back %d messages (%s)", len(messages), error)
                return

    def forget(self) -> None:
        """Forget what is held: the connection is lost, and the broker delivers the messages again."""
        for _, timer, _ in self._held.values():
            self._consumer.timer.cancel(timer)
        self._held.clear()

    def _release(self, key: int) -> None:
        message, _, extra = self._held.pop(key)
        message.requeue()
        if extra:
            self._consumer.qos.decrement_eventually()

    def _report(self, queue: str, what: str) -> None:
        tally = self._tallies.setdefault(queue, _Tally())
        tally.count += 1
        if (now := time.monotonic()) < tally.report_at:
            return
        log.warning(
            "queue %s: perdure has no task for %d messages, the last one %s; they are returned to the queue: "
            "another application uses it, too, or a program misspells a name",
            queue, tally.count, what,
        )  # fmt: skip
        tally.count, tally.report_at = 0, now + _REPORT_S
