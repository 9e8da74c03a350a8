"""How many tasks of each queue a worker process runs at once, and from which queues it takes now.

Every queue has room of its own, with threads of its own in the pool: turns that wait on a slow model never keep
deliveries, endings or submissions from running, nor these the turns. The worker takes from a queue only while a
task of it can begin at once. A message for which there is no room stays in the broker, or goes back there, where
an idle worker finds it. Only a task with a countdown waits in this process, for its time and then for a place.

Redis gives a message only on request, so the worker stops asking. RabbitMQ sends ahead up to the prefetch count:
what arrives after the last place is taken is held until the consumer is cancelled, and then returned.

Used by `perdure.workers.consumer.consumer`. All methods but `leave` run in the thread of the worker's event loop.
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
"""The most tasks of one queue that a process runs at once; a smaller `--concurrency` bounds each of them further.

`sessions` and `memory` have two places more than their semaphores count, for the tasks that beat sends. With a
concurrency of 22 or 10 or less, tasks that hang can occupy all places of `sessions` or `memory`, and only these.
"""


class Tap(Protocol):
    """The worker's side of the broker."""

    def soon(self, work: Any, queue: str) -> None:
        """Have the event loop call `work(queue)`. Any thread may call this."""
        ...

    def cancel(self, queue: str) -> None:
        """Stop taking from a queue, if it is taken from. Messages may still be received before this returns."""
        ...

    def consume(self, queue: str) -> None:
        """Take from a queue again, if it is not."""
        ...


class Rooms:
    """Counts the tasks that run, by queue. `concurrency` is the most for any queue, and the number for turns."""

    def __init__(self, concurrency: int, tap: Tap) -> None:
        self._concurrency = concurrency
        self._tap = tap
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._cancelled: set[str] = set()
        self._without_room: list[tuple[str, Any]] = []
        self._waiting: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def of(self, queue: str) -> int:
        """Tasks of `queue` that may run at once."""
        return min(self._concurrency, _MOST.get(queue, self._concurrency))

    def is_cancelled(self, queue: str) -> bool:
        """Whether the worker takes nothing from `queue` until a task of it ends."""
        with self._lock:
            return queue in self._cancelled

    def has_room(self, queue: str) -> bool:
        """Whether a task of `queue` can begin now."""
        return self._running[queue] < self.of(queue)

    def begin(self, queue: str, start: Callable[[], None]) -> bool:
        """Start a task of `queue`; without room, once another one has ended. Whether it started now.

        Only a task whose countdown has passed comes here without room: its message was received when there was some.
        """
        if not self.has_room(queue):
            with self._lock:
                self._waiting[queue].append(start)
            self._tap.soon(self._reopen, queue)  # a task may have ended before this one was appended
            return False
        self.enter(queue)
        start()
        return True

    def enter(self, queue: str) -> None:
        """A task begins."""
        with self._lock:
            self._running[queue] += 1
        if not self.has_room(queue):
            self._tap.soon(self._close, queue)

    def leave(self, queue: str) -> None:
        """A task has ended. Any thread may call this."""
        with self._lock:
            self._running[queue] -= 1
            waiting = queue in self._cancelled or bool(self._waiting[queue])
        if waiting:
            self._tap.soon(self._reopen, queue)

    def hold(self, queue: str, message: Any) -> None:
        """A message came without room for it: it goes back to the broker once the queue is cancelled."""
        self._without_room.append((queue, message))
        self._tap.soon(self._close, queue)

    def lost(self) -> None:
        """The connection is gone, and with it what was held; the next one takes from every queue."""
        with self._lock:
            self._cancelled.clear()
            self._waiting.clear()
        self._without_room.clear()

    def return_held(self) -> None:
        """Return to the broker what is held."""
        held, self._without_room = self._without_room, []
        for _, message in held:
            message.requeue()
        if held:
            log.debug("returned %d messages for which there was no room", len(held))

    def _close(self, queue: str) -> None:
        if not self.has_room(queue):
            with self._lock:
                self._cancelled.add(queue)  # before `cancel`: a task that ends during it must reopen the queue
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
