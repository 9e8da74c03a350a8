"""The watchdog: a process that kills a worker if no Python thread of the worker has run for some seconds.

A computation in C that holds the interpreter lock (a regular expression, an integer of a million digits) stops every
thread of its process: turns stop, leases expire, signals are not handled. So a second process, the watchdog, watches
the worker. The worker's thread `perdure-heartbeat` (`perdure.workers.watchdog.heartbeat`) writes heartbeats to the
watchdog's stdin. If no heartbeat arrives within the limit, the watchdog reports the kill
(`perdure.workers.watchdog.kill_report`), logs the kill, makes the worker write its threads' stacks, and kills the
worker. If a heartbeat arrives during the report, the watchdog withdraws the report and does not kill the worker. Other
workers claim the turns of a killed worker. The worker's child processes end with it (`perdure.workers.isolated.child`).

If a check of the watchdog is late, the machine or the whole process tree was paused. The watchdog then restarts the
time limit. The watchdog ends when the worker has ended.

The worker starts this file as a script, in an isolated interpreter: import only the standard library here.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOKS = 30
"""The number of checks by the watchdog, and of heartbeats by the worker, within the limit."""

DUMP_SIGNAL = signal.SIGURG
"""Makes the worker write its threads' stacks. A process without a handler ignores this signal."""

WITHDRAW = "withdraw"
"""If this is the last argument of the report program, the program withdraws the report."""

_OVERRUN = 10
"""A check that is late by more than the limit divided by this number means that the watchdog was paused."""

_REPORT_S = 10.0
_DUMP_S = 1.0
_END_S = 5.0
_LOG_S = 0.5
_BEATS = 65_536


@dataclass(frozen=True, slots=True)
class Watched:
    """The watched worker. `limit_s`: seconds of silence before the kill; `report`: the command that reports a kill."""

    pid: int
    name: str
    limit_s: float
    report: Sequence[str]


def command(pid: int, name: str, limit_s: float, report: Sequence[str]) -> list[str]:
    """The command that starts a watchdog for the process `pid`. The process `pid` itself must run the command.

    `report` is the argument list of the program that reports a kill. The watchdog appends the worker's name, process id
    and seconds of silence. To withdraw the report, the watchdog also appends `WITHDRAW`.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(pid), name, str(limit_s), *report]


def main(arguments: Sequence[str]) -> None:
    """Watch the worker until it has ended. Kill the worker if it is silent for too long."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # signals to the process group are for the worker
    pid, name, limit_s, *report = arguments
    worker = Watched(int(pid), name, float(limit_s), report)
    while (silent_s := _until_silent(worker)) is not None:
        _report(worker, silent_s)
        if not _has_beaten():
            _kill(worker, silent_s)
            return
        _log("WARNING", f"{worker.name} has recovered after {silent_s:.1f} s of silence, and is not killed")
        _report(worker, silent_s, WITHDRAW)


def _until_silent(worker: Watched) -> float | None:
    """Wait until the worker is silent for `limit_s`; returns the silence in seconds, `None` if the worker has ended."""
    look_s = worker.limit_s / LOOKS
    heard_at = looked_at = time.monotonic()
    while _lives(worker):
        ready, _, _ = select.select([0], [], [], look_s)
        if ready and not os.read(0, _BEATS):
            return None
        now = time.monotonic()
        paused_s = now - looked_at - look_s
        if paused_s > worker.limit_s / _OVERRUN:
            _log(
                "WARNING", f"the watchdog was paused for {paused_s:.1f} s: the silence of {worker.name} counts from now"
            )
        if ready or paused_s > worker.limit_s / _OVERRUN:
            heard_at = now
        if now - heard_at >= worker.limit_s:
            return now - heard_at
        looked_at = now
    return None


def _lives(worker: Watched) -> bool:
    """Whether the worker lives. Once the worker has ended, this process has another parent."""
    return os.getppid() == worker.pid


def _report(worker: Watched, silent_s: float, *withdraw: str) -> None:
    """Report the kill; with the argument `WITHDRAW`, withdraw the report.

    Call this before the kill: when the worker ends, its supervisor or container may end this process, too.
    """
    arguments = [*worker.report, worker.name, str(worker.pid), f"{silent_s:.1f}", *withdraw]
    try:
        subprocess.run(arguments, stdin=subprocess.DEVNULL, timeout=_REPORT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _log("WARNING", f"the kill of {worker.name} was not {'withdrawn' if withdraw else 'reported'}: {error}")


def _has_beaten() -> bool:
    """Read the heartbeats since the last check; returns whether there were any. False at EOF."""
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready and os.read(0, _BEATS))


def _kill(worker: Watched, silent_s: float) -> None:
    """Log the kill, make the worker write its threads' stacks, and kill it."""
    _log(
        "ERROR",
        f"{worker.name} (process {worker.pid}) is killed: no thread of it has run for {silent_s:.1f} s. "
        f"It is stopped, or a call holds Python's interpreter lock; the stacks of its threads follow",
    )
    _signal(worker, DUMP_SIGNAL)
    _wait(worker, _DUMP_S)
    _signal(worker, signal.SIGKILL)
    _wait(worker, _END_S)
    if _lives(worker):
        _log("ERROR", f"{worker.name} (process {worker.pid}) has not ended {_END_S:g} s after SIGKILL")


def _signal(worker: Watched, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if _lives(worker):
            os.kill(worker.pid, number)


def _wait(worker: Watched, seconds: float) -> None:
    """Wait until the worker has ended, but at most `seconds`."""
    until = time.monotonic() + seconds
    while _lives(worker) and time.monotonic() < until:
        time.sleep(_DUMP_S / 20)


def _log(level: str, text: str) -> None:
    """Write a line in the worker's log format. Wait at most `_LOG_S`: a blocked pipe must not prevent the kill."""
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1_000):03d}"
    line = f"{stamp} {level} perdure.workers.watchdog.process - {text}\n".encode(errors="replace")
    writing = threading.Thread(target=_write, args=(line,), daemon=True)
    writing.start()
    writing.join(_LOG_S)


def _write(line: bytes) -> None:
    with suppress(OSError):
        os.write(2, line)


if __name__ == "__main__":
    main(sys.argv[1:])
