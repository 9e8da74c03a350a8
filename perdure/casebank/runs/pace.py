"""Limits the load of a run: the run works `load_percent` of the time and pauses for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_REST_S = 0.001


class Pace:
    """Limits work to `load_percent` of the time. `pause` waits the given seconds, or raises to stop the work."""

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
        """Pause in proportion to the work since the last pause.

        A pause of less than a millisecond is put off until a later call. With `load_percent` 100, each call
        nevertheless runs `pause(0)`, which may raise to stop the work.
        """
        due_s = (self._monotonic() - self._since) * self._rest_per_work
        if due_s >= _SHORTEST_REST_S or not self._rest_per_work:
            self._pause(due_s)
            self._since = self._monotonic()
