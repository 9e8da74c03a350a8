"""Divides a limited number of slots among competitors, so that none of them can take all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class DeliveryShares:
    """`total` slots. A competitor gets a slot while it holds fewer slots than are free. Threads may share an instance.

    So one competitor alone can hold half of the slots, and another one always finds a free slot, unless there are as
    many competitors as slots.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def slot(self, competitor: str) -> Iterator[bool]:
        """Hold a slot during the block, if the competitor gets one; yields whether it got one."""
        with self._lock:
            taken = self._held[competitor] < self._total - self._held.total()
            self._held[competitor] += taken
        try:
            yield taken
        finally:
            if taken:
                with self._lock:
                    self._held[competitor] -= 1
                    self._held += Counter()  # forgets competitors without a slot
