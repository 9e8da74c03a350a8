"""Signals that end a command in the foreground cleanly: its blocks stop what they have started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from perdure.servers.process.stop_signals import stop_signals


@contextmanager
def interruptible(said: str) -> Iterator[None]:
    """Make each of `stop_signals` leave the block, once; then print `said`."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


def ignore_signals() -> None:
    """Ignore further signals: they must not interrupt a shutdown, which is time-limited."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
