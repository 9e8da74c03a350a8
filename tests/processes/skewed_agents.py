"""The agents of a worker on a machine whose clock is a minute ahead."""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.clock import SystemClock
from tests.processes.plain_agents import tester

__all__ = ["tester"]

_now = SystemClock.now


def _ahead(clock: SystemClock) -> datetime:
    return _now(clock) + timedelta(minutes=1)


SystemClock.now = _ahead  # type: ignore[assignment,method-assign]
