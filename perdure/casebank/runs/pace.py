"""Pace: a run works a share of the time and rests in between, so that others hardly notice it."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_REST_S = 0.001


class Pace:
    """Works `load_percent` of the time. `pause` waits for so many seconds; what it raises ends the work."""

    def __init__(
        self,
        load_percent: int,
        pause: Callable[[float], object] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rest_per_work = 100 / load_percent - 1
        self._pause = pause
        self._monotonic = monotonic
        self._since = monotonic()

    def rest(self) -> None:
        """Rest for what was worked since the last rest, once it is worth it; who owes nothing pauses for nothing."""
        owed_s = (self._monotonic() - self._since) * self._rest_per_work
        if owed_s >= _SHORTEST_REST_S or not self._rest_per_work:
            self._pause(owed_s)
            self._since = self._monotonic()
