"""Classifies errors for retries and circuit breakers.

The chain of an error is the error itself, then its causes (`__cause__`). The first error in the chain that can be
classified determines the verdict:

- A cancellation is `ABANDONED`.
- The attribute `transient` classifies an error of `perdure.errors`.
- The HTTP status classifies any other error that has one.
- Python's connection and timeout errors are `TRANSIENT`.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from concurrent.futures import CancelledError
from enum import Enum, auto
from http import HTTPStatus

from perdure.errors import Abandoned, ContentFiltered, PerdureError

_CANCELLATIONS = (Abandoned, CancelledError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
_TRANSIENT_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class FailureKind(Enum):
    """What an error means for retries and for the breaker."""

    TRANSIENT = auto()
    """The next attempt may succeed."""
    PERMANENT = auto()
    """The error cannot be classified. It is not retried, and the breaker counts it."""
    REFUSED = auto()
    """The callee refused the request. The error is not retried, and the breaker does not count it."""
    ABANDONED = auto()
    """The call was cancelled. The error is not retried, and the breaker does not count it."""


def verdict(error: BaseException) -> FailureKind:
    """The verdict on the first error in the chain of `error` that can be classified; `PERMANENT` if none can."""
    for each in _chain(error):
        if isinstance(each, _CANCELLATIONS):
            return FailureKind.ABANDONED
        transient = _is_transient(each)
        if transient is not None:
            return FailureKind.TRANSIENT if transient else FailureKind.REFUSED
    return FailureKind.PERMANENT


def allows_fallback(error: BaseException) -> bool:
    """Whether another service may be asked after `error`.

    Not after a cancellation, and not if a content filter refuses the input: that is no outage, and asking until some
    provider answers would evade the filter.
    """
    return verdict(error) is not FailureKind.ABANDONED and not any(
        isinstance(each, ContentFiltered) for each in _chain(error)
    )


def requested_pause_s(error: BaseException) -> float | None:
    """The pause in seconds that the failed callee requests (`Retry-After`); `None` if it is missing or invalid."""
    for each in _chain(error):
        if isinstance(each, PerdureError) and each.retry_after_s is not None:
            requested = each.retry_after_s
            return requested if math.isfinite(requested) and requested >= 0 else None
    return None


def _is_transient(error: BaseException) -> bool | None:
    if isinstance(error, PerdureError):
        return error.transient
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and status >= HTTPStatus.BAD_REQUEST:
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _TRANSIENT_STATUSES
    return True if isinstance(error, ConnectionError | TimeoutError | socket.gaierror) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and its causes, each once, even if the chain is a cycle.

    Ignores `__context__`: the error that was being handled is not always the cause of the new error.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__
