"""Retries: only of transient failures, with growing delays, within the call's time limit.

The breaker is outside, so all tries of a call count there once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from perdure.errors import loggable
from perdure.resilience.failures import Verdict, asked_pause_s, verdict
from perdure.settings import RetrySettings

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_GROWTHS = 64  # beyond the cap anyway, and 2.0 ** 2000 overflows


class Window(Protocol):
    """The time that a call has."""

    def remaining(self) -> float:
        """Seconds left. Raises if the call is over."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`. Raises at once if the call is ended."""
        ...


def retrying(what: str, work: Callable[[], T], policy: RetrySettings, window: Window, draw: Callable[[], float]) -> T:
    """The result of the first try of `work` that succeeds.

    Args:
        what: Names the work in the log.
        work: One try.
        policy: The number of tries, and the pauses between them.
        window: The call's time.
        draw: A number from [0, 1), for the jitter.

    Raises:
        Exception: the last try's, if it is not transient, if the tries are used up, or if the call's time does not
            suffice for the pause.
    """
    tried = 1
    while True:
        try:
            return work()
        except Exception as error:
            if tried >= policy.max_attempts or verdict(error) is not Verdict.PASSING:
                raise
            pause_s = pause_before_next(error, policy, tried, draw())
            if pause_s >= window.remaining():
                raise
            text = "%s: try %d of %d failed (%s); again in %.1f s"
            log.info(text, what, tried, policy.max_attempts, loggable(error), pause_s)
        window.wait(pause_s)
        tried += 1


def pause_before_next(error: BaseException, policy: RetrySettings, tried: int, drawn: float) -> float:
    """Seconds to wait after `tried` tries: the policy's pause, or the requested one if that is longer."""
    return max(backoff_s(policy, tried, drawn), asked_pause_s(error) or 0.0)


def backoff_s(policy: RetrySettings, tried: int, drawn: float) -> float:
    """Seconds to wait after `tried` tries: exponential, capped, and varied by `drawn` from [0, 1)."""
    grown = min(policy.base_s * policy.multiplier ** min(tried - 1, _MOST_GROWTHS), policy.cap_s)
    return min(grown * (1 + policy.jitter * (2 * drawn - 1)), policy.cap_s)
