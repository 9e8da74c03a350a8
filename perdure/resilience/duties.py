"""Runs recurring work in duties that stand alone: a duty that fails keeps no other duty from its turn.

A duty is a named function that runs in rounds, such as a step of the sweep. Each call has its own `try`, and each
failure is followed by a pause of this duty. Other duties do not pause.

    duties = Duties(clock, first_pause_s=5)
    while not stopped.wait(5):
        duties.run("deliveries", wake_deliveries)
        duties.run("erasures", finish_erasures)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from perdure.clock import Clock
from perdure.errors import PerdureError, Unavailable, loggable

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0

NOT_DUE = object()
"""What a duty returns if another process has taken its round, which is neither a success nor a failure."""

_Result = TypeVar("_Result")


class Duties:
    """The failures of a process's duties, by name.

    A duty that fails pauses for `first_pause_s` seconds. The pause doubles with each consecutive failure, up to
    `longest_pause_s`. It does not grow while a server is unavailable, so that work continues soon after an outage. Each
    name may be used by one thread at a time.
    """

    def __init__(
        self,
        clock: Clock,
        first_pause_s: float,
        longest_pause_s: float = LONGEST_PAUSE_S,
        *,
        observe: Callable[[str, str], None] = lambda _name, _outcome: None,
    ) -> None:
        """`observe` is called after each round that was due, with the duty's name and `succeeded` or `failed`."""
        self._clock = clock
        self._observe = observe
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._failures: dict[str, tuple[int, float]] = {}  # by name: consecutive failures, and the end of the pause

    def run(self, name: str, work: Callable[[], _Result]) -> _Result | None:
        """Run the duty `name`, unless it pauses; returns its result, or `None` if it pauses or fails. Never raises.

        A round that was `NOT_DUE` does not end the failures of a duty. Each failure is one line in the log. The first
        of several consecutive unexpected failures has a traceback.
        """
        failures, paused_until = self._failures.get(name, (0, 0.0))
        if failures and self._clock.monotonic() < paused_until:
            return None
        try:
            result = work()
        except Exception as error:
            doublings = 0 if isinstance(error, Unavailable) else min(failures, 30)
            pause_s = min(self._first_pause_s * 2**doublings, self._longest_pause_s)
            self._failures[name] = (failures + 1, self._clock.monotonic() + pause_s)
            self._observe(name, "failed")
            log.warning(
                "the duty %r failed, and pauses for %g s: %s", name, pause_s, loggable(error),
                exc_info=not failures and not isinstance(error, PerdureError),
            )  # fmt: skip
            return None
        if result is NOT_DUE:
            return None
        self._observe(name, "succeeded")
        if failures:
            del self._failures[name]
            log.info("the duty %r succeeded again", name)
        return result
