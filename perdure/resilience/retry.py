"""Retries calls that fail transiently, with exponential backoff, within the call's time limit.

A circuit breaker wraps the retries, so the breaker counts all attempts of a call as one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from perdure.errors import loggable
from perdure.resilience.failures import FailureKind, requested_pause_s, verdict
from perdure.settings import RetrySettings

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_EXPONENT = 64  # a power with a much larger exponent could overflow a float


class Window(Protocol):
    """The time limit of one call."""

    def remaining(self) -> float:
        """Seconds left for the call. Raises if the call has ended or its time is up."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`. Raises at once if the call is aborted."""
        ...


def retrying(what: str, work: Callable[[], T], policy: RetrySettings, window: Window, draw: Callable[[], float]) -> T:
    """Call `work` until it succeeds or fails permanently, or until the attempts or the call's time are used up.

    Args:
        what: The name of the work in the log.
        work: Makes one attempt.
        policy: The number of attempts, and the backoff.
        window: The call's time limit.
        draw: Returns a number in [0, 1) for the jitter.

    Raises:
        Exception: the error of the last attempt. If the pause after an attempt would use up the call's remaining time,
            this attempt is the last.
    """
    tried = 1
    while True:
        try:
            return work()
        except Exception as error:
            if tried >= policy.max_attempts or verdict(error) is not FailureKind.TRANSIENT:
                raise
            pause_s = pause_before_next(error, policy, tried, draw())
            if pause_s >= window.remaining():
                raise
            text = "%s: attempt %d of %d failed (%s), retrying in %.1f s"
            log.info(text, what, tried, policy.max_attempts, loggable(error), pause_s)
        window.wait(pause_s)
        tried += 1


def pause_before_next(error: BaseException, policy: RetrySettings, tried: int, drawn: float) -> float:
    """Seconds to wait after `tried` attempts: the backoff or the pause that `error` requests, whichever is longer."""
    return max(backoff_s(policy, tried, drawn), requested_pause_s(error) or 0.0)


def backoff_s(policy: RetrySettings, tried: int, drawn: float) -> float:
    """The backoff in seconds after `tried` attempts.

    The backoff grows exponentially up to `policy.cap_s`. `drawn`, a number in [0, 1), determines the jitter.
    """
    grown = min(policy.base_s * policy.multiplier ** min(tried - 1, _MAX_EXPONENT), policy.cap_s)
    return min(grown * (1 + policy.jitter * (2 * drawn - 1)), policy.cap_s)
