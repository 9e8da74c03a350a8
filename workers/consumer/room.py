"""Limits the concurrent tasks of each queue in a worker process, and consumes only queues with room.

A queue has room while the number of its running tasks is below its limit. The pool has as many threads as the limits
of all queues together. So turns that wait for a slow model do not delay tasks of other queues, and those tasks do not
delay turns.

The worker consumes a queue only while the queue has room. Otherwise messages stay in the broker or are returned to it,
so that an idle worker can consume them. Only a task with a countdown waits in this process, first until it is due and
then for room.

Redis sends a message only on request, so the worker requests no messages of a queue without room. RabbitMQ sends
messages in advance, up to the prefetch count. The worker holds messages that arrive without room, stops consuming their
queue, and then returns the messages.

`perdure.workers.consumer.consumer` uses `Rooms`. All methods of `Rooms` except `leave` run in the thread of the
worker's event loop.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from perdure.tasks.process import CONSOLIDATIONS, DELIVERIES, ENDINGS

log = logging.getLogger(__name__)

_MOST: Mapping[str, int] = {
    "ingress": 8,
    "deliveries": DELIVERIES,
    "sessions": ENDINGS + 2,
    "memory": CONSOLIDATIONS + 2,
    "maintenance": 4,
}
"""The limit on concurrent tasks of each queue. If `--concurrency` is smaller, then `--concurrency` is the limit.

A semaphore limits the tasks in `sessions` that end sessions (`ENDINGS`), and another limits the tasks in `memory` that
consolidate sessions (`CONSOLIDATIONS`). Each of the two queues allows two tasks more than its semaphore, for the tasks
that beat sends. If `--concurrency` is not higher than the count of a queue's semaphore, hung tasks can use up the limit
of this queue, but not the limits of other queues.
"""


class Tap(Protocol):
    """The methods of the consumer that `Rooms` calls."""

    def soon(self, work: Any, queue: str) -> None:
        """Schedule `work(queue)` on the event loop. Any thread may call this."""
        ...

    def cancel(self, queue: str) -> None:
        """Stop consuming a queue. Idempotent. Messages may still arrive before this returns."""
        ...

    def consume(self, queue: str) -> None:
        """Consume a queue again. Idempotent."""
        ...


class Rooms:
    """Counts the running tasks of each queue. `concurrency` is the limit for turns; no queue has a higher limit."""

    def __init__(self, concurrency: int, tap: Tap) -> None:
        self._concurrency = concurrency
        self._tap = tap
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._cancelled: set[str] = set()
        self._without_room: list[tuple[str, Any]] = []
        self._waiting: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def of(self, queue: str) -> int:
        return min(self._concurrency, _MOST.get(queue, self._concurrency))

    def is_cancelled(self, queue: str) -> bool:
        with self._lock:
            return queue in self._cancelled

    def has_room(self, queue: str) -> bool:
        return self._running[queue] < self.of(queue)

    def begin(self, queue: str, start: Callable[[], None]) -> bool:
        """Call `start` now if `queue` has room, else when a task of `queue` ends; returns whether it called `start`.

        Only a task with a countdown can lack room at this point: its message arrived earlier, while there was room.
        """
        if not self.has_room(queue):
            with self._lock:
                self._waiting[queue].append(start)
            self._tap.soon(self._reopen, queue)  # a running task may have ended before `start` was appended
            return False
        self.enter(queue)
        start()
        return True

    def enter(self, queue: str) -> None:
        """Count a task that starts."""
        with self._lock:
            self._running[queue] += 1
        if not self.has_room(queue):
            self._tap.soon(self._close, queue)

    def leave(self, queue: str) -> None:
        """Count a task that has ended. Any thread may call this."""
        with self._lock:
            self._running[queue] -= 1
            waiting = queue in self._cancelled or bool(self._waiting[queue])
        if waiting:
            self._tap.soon(self._reopen, queue)

    def hold(self, queue: str, message: Any) -> None:
        """Hold a message that arrived without room, and return it to the broker once `queue` is no longer consumed."""
        self._without_room.append((queue, message))
        self._tap.soon(self._close, queue)

    def forget(self) -> None:
        """Forget held messages, waiting tasks and cancelled queues. Call this when the connection is lost.

        The next connection consumes every queue.
        """
        with self._lock:
            self._cancelled.clear()
            self._waiting.clear()
        self._without_room.clear()

    def return_held(self) -> None:
        """Return the held messages to the broker."""
        held, self._without_room = self._without_room, []
        for _, message in held:
            message.requeue()
        if held:
            log.debug("returned %d messages for which there was no room", len(held))

    def _close(self, queue: str) -> None:
        if not self.has_room(queue):
            with self._lock:
                self._cancelled.add(queue)  # before the call, so that a task that ends during it reopens the queue
            self._tap.cancel(queue)
            self._reopen(queue)
        self.return_held()

    def _start_waiting(self, queue: str) -> None:
        while self.has_room(queue):
            with self._lock:
                if not self._waiting[queue]:
                    return
                start = self._waiting[queue].popleft()
            self.enter(queue)
            start()

    def _reopen(self, queue: str) -> None:
        self._start_waiting(queue)
        with self._lock:
            if queue not in self._cancelled or not self.has_room(queue):
                return
            self._cancelled.discard(queue)
        self._tap.consume(queue)
