"""Counts events of one kind, so that they are logged as one line a minute, however many another program causes."""

from __future__ import annotations

import time
from dataclasses import dataclass

REPORT_S = 60.0
"""Seconds between two log lines about events of one kind."""


@dataclass(slots=True)
class Tally:
    """The events of one kind since the last log line, and the monotonic time until which they are only counted."""

    count: int = 0
    report_at: float = 0.0

    def add(self) -> bool:
        """Count an event; returns whether a line is due, which calls `take`."""
        self.count += 1
        return time.monotonic() >= self.report_at

    def take(self) -> int:
        """The events since the last line, for a line that is written now."""
        count, self.count, self.report_at = self.count, 0, time.monotonic() + REPORT_S
        return count
