"""Holds messages that this worker cannot process, and returns each to its queue after a pause.

An application on the same broker may have a queue with the name of one of perdure's queues. A worker then also receives
that application's messages. Celery would discard these messages and record a failure. perdure holds each message,
unacknowledged, for `DELAY_S`, and then returns it to its queue.

The pause prevents a busy loop: if no worker of that application waits for messages, a message that is returned at once
comes back to this worker within a millisecond. Leaving the message unacknowledged until the visibility timeout
would delay the message by a minute on Redis. RabbitMQ has no such timeout.

Held messages do not use the worker's prefetch slots, which all queues share. A worker that holds `HELD` messages of one
queue stops consuming that queue until it has returned all of them. So the backlog of another application neither fills
the worker's memory nor stops the worker's other queues. The broker redelivers the held messages of a worker that dies.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from typing import Any, Protocol

from perdure.errors import loggable
from perdure.workers.consumer.room import Tap
from perdure.workers.consumer.tally import Tally

log = logging.getLogger(__name__)

DELAY_S = 1.0
HELD = 100
"""The number of held messages of one queue at which the worker stops consuming the queue."""


class Holder(Tap, Protocol):
    """The attributes and methods of the consumer that `UnknownTasks` uses."""

    timer: Any
    qos: Any


class UnknownTasks:
    """Holds messages of `consumer`, and returns them. Call its methods only in the consumer's event loop."""

    def __init__(self, consumer: Holder) -> None:
        self._consumer = consumer
        self._held: dict[int, tuple[Any, Any, str]] = {}
        self._of: Counter[str] = Counter()
        self._full: set[str] = set()
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)

    def is_full(self, queue: str) -> bool:
        return queue in self._full

    def hold(self, message: Any, queue: str, what: str) -> None:
        """Hold `message`, and return it to `queue` after `DELAY_S`. `what` describes the message in the log."""
        self._report(queue, what)
        self._consumer.qos.increment_eventually()
        timer = self._consumer.timer.call_after(DELAY_S, self._release, (id(message),))
        self._held[id(message)] = (message, timer, queue)
        self._of[queue] += 1
        if self._of[queue] >= HELD:
            self._full.add(queue)
            self._consumer.soon(self._cancel, queue)  # later, since `hold` runs in a callback of the consumer to cancel

    def release_all(self) -> None:
        """Return all held messages now. Stops at an error: the broker redelivers the remaining messages later."""
        messages = [message for message, _, _ in self._held.values()]
        self.forget()
        for returned, message in enumerate(messages):
            try:
                message.requeue()
            except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
                left = len(messages) - returned
                log.warning("%d messages could not be returned to the broker (%s)", left, loggable(error))
                return

    def forget(self) -> None:
        """Forget the held messages: the connection is lost, and the broker redelivers them."""
        for _, timer, _ in self._held.values():
            self._consumer.timer.cancel(timer)
        self._held.clear()
        self._of.clear()
        self._full.clear()

    def _release(self, key: int) -> None:
        message, _, queue = self._held.pop(key)
        self._of[queue] -= 1
        message.requeue()
        self._consumer.qos.decrement_eventually()
        if queue in self._full and not self._of[queue]:
            self._full.discard(queue)
            self._consumer.consume(queue)

    def _cancel(self, queue: str) -> None:
        if queue in self._full:
            self._consumer.cancel(queue)

    def _report(self, queue: str, what: str) -> None:
        tally = self._tallies[queue]
        if not tally.add():
            return
        log.warning(
            "queue %s: perdure has no task for %d messages, the last one %s; they are returned to the queue. "
            "Another application uses the queue, or a publisher misspells a name",
            queue, tally.take(), what,
        )  # fmt: skip
