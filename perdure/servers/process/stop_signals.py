"""The signals that stop a program: those of Ctrl-C and of a supervisor, and the one that a closed terminal sends."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP unless this process ignores it, as `nohup` requests.

    Call this before another handler of SIGHUP is installed.
    """
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)
