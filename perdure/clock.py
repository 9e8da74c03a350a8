"""Time, passed to every module, so that a test can move it.

SQL calls `perdure_now()`, which adds the connection's `perdure.clock_offset` (only tests set it) to the server's clock.
Leases are measured by the database's clock. Whether a lease still holds within this process is measured by the
monotonic clock, which no administrator can set back.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The time of day, and a monotonic time."""

    def now(self) -> datetime:
        """The time of day, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """The time of day, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Monotonic seconds of the machine."""
        return time.monotonic()


class MovedClock:
    """The machine's clock plus an offset that a test moves by hand."""

    def __init__(self) -> None:
        self._offset = timedelta()

    @property
    def offset(self) -> timedelta:
        """How far this clock is ahead of the machine's."""
        return self._offset

    def advance(self, by: timedelta) -> None:
        """Move the clock ahead by `by`."""
        self._offset += by

    def now(self) -> datetime:
        """The machine's time of day plus the offset."""
        return datetime.now(UTC) + self._offset

    def monotonic(self) -> float:
        """The machine's monotonic seconds plus the offset."""
        return time.monotonic() + self._offset.total_seconds()
