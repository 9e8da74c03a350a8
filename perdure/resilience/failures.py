"""Classifies failures: is it transient, and does it count for the breaker?

The first error in the chain of causes with a known class decides: an error of `perdure.errors` by `transient`, a
foreign one by its HTTP status, or as Python's own error for connections and timeouts. Retries and breakers both use
this, so they cannot disagree.
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
    """The meaning of an error for a retry and for a breaker."""

    PASSING = auto()
    """A failure that the next try may not meet."""
    LASTING = auto()
    """A failure that is not known to be transient."""
    REFUSED = auto()
    """The request was invalid: it is not repeated, and the dependency is healthy."""
    ABANDONED = auto()
    """The caller ended the call; nothing is known about the dependency."""


def verdict(error: BaseException) -> Verdict:
    """The class of `error`, by the first known error in its chain of causes."""
    for each in _chain(error):
        if isinstance(each, _CANCELLATIONS):
            return Verdict.ABANDONED
        passes = _passes(each)
        if passes is not None:
            return Verdict.PASSING if passes else Verdict.REFUSED
    return Verdict.LASTING


def asked_pause_s(error: BaseException) -> float | None:
    """The seconds of a `Retry-After`; `None` if there is none or it is invalid."""
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
    """`error` and its causes, each once, even in a cycle.

    `__context__` is not followed: an error that is raised while another is handled is not caused by it.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__
