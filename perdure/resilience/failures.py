"""Classifying a failure: is it transient, and does it count for the breaker?

The first error in the chain of causes with a known class decides: an error of `perdure.errors` by `transient`, a
foreign one by its HTTP status or by being Python's own for connections and timeouts. Retries and breakers both ask
here, so they cannot disagree.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from concurrent.futures import CancelledError
from enum import Enum, auto
from http import HTTPStatus

from perdure.errors import Abandoned, PerdureError

_CANCELLATIONS = (Abandoned, CancelledError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
_PASSING_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class Verdict(Enum):
    """What an error means to a retry and to a breaker."""

    PASSING = auto()
    """A failure that may be over at the next try."""
    LASTING = auto()
    """A failure, and nothing says that it will pass."""
    REFUSED = auto()
    """The request was at fault: it is not made again, and whoever refused it is well."""
    ABANDONED = auto()
    """The caller gave up; nothing is known of whoever was called."""


def verdict(error: BaseException) -> Verdict:
    """What `error` means, by the first of its chain of causes that knows."""
    for each in _chain(error):
        if isinstance(each, _CANCELLATIONS):
            return Verdict.ABANDONED
        passes = _passes(each)
        if passes is not None:
            return Verdict.PASSING if passes else Verdict.REFUSED
    return Verdict.LASTING


def asked_pause_s(error: BaseException) -> float | None:
    """Seconds for which whoever failed asks to be left alone; None if it does not, or asks nonsense."""
    for each in _chain(error):
        if isinstance(each, PerdureError) and each.retry_after_s is not None:
            asked = each.retry_after_s
            return asked if math.isfinite(asked) and asked >= 0 else None
    return None


def _passes(error: BaseException) -> bool | None:
    if isinstance(error, PerdureError):
        return error.transient
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and status >= HTTPStatus.BAD_REQUEST:
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _PASSING_STATUSES
    return True if isinstance(error, ConnectionError | TimeoutError | socket.gaierror) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and its causes, each once, though they go in a circle.

    Not `__context__`: an error that is only raised while another is handled is not made by it.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__
