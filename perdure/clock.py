"""The clock that is passed to every module, so that tests can set the time.

SQL calls `perdure_now()`, which adds the connection's `perdure.clock_offset` (set by tests only) to the server's clock.
The database's clock sets when a lease expires. A worker uses its monotonic clock, which cannot be set back, to decide
whether its own lease is still valid.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The wall clock and the monotonic clock."""

    def now(self) -> datetime:
        """The current time in UTC, timezone-aware."""
        ...

    def monotonic(self) -> float:
        """Seconds since a fixed but unspecified time; never decreases."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


class MovedClock:
    """The machine's clock plus an offset that a test sets.

    Example:
        >>> clock = MovedClock()
        >>> before = clock.now()
        >>> clock.advance(timedelta(hours=1))
        >>> clock.now() - before >= timedelta(hours=1)
        True
    """

    def __init__(self) -> None:
        self._offset = timedelta()

    @property
    def offset(self) -> timedelta:
        return self._offset

    def advance(self, by: timedelta) -> None:
        self._offset += by

    def now(self) -> datetime:
        return datetime.now(UTC) + self._offset

    def monotonic(self) -> float:
        return time.monotonic() + self._offset.total_seconds()


def iso(at: datetime | None) -> str | None:
    """The instant in ISO 8601, as a member of JSON; `None` stays `None`."""
    return None if at is None else at.isoformat()
