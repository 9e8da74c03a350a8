"""The watchdog: a process that kills a worker in which no Python thread has run for too long.

A computation in C that holds Python's interpreter lock (a regular expression, an integer of a million digits) stops
every thread of its process: no turn goes on, no lease is renewed, no signal is handled. No thread of that process can
end it. The worker's thread `perdure-heartbeat` (`perdure.workers.watchdog.heartbeat`) writes to this process's stdin;
once nothing has come for the limit, this process reports the kill (`perdure.workers.watchdog.kill_report`), logs it,
has the worker write its threads' stacks, and kills it. A worker that beats again during the report is not killed, and
the report is withdrawn. Turns of a killed worker are claimed elsewhere; isolated children die with it
(`perdure.workers.isolated.run`).

If this process itself did not run in time, the machine or the whole process tree was paused, and the time begins anew.
It ends as soon as the worker has ended.

The worker starts this file as a script of its own, in an isolated interpreter; nothing but the standard library may be
imported here.
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
"""Times that the watchdog looks, and the worker beats, within the limit."""

DUMP_SIGNAL = signal.SIGURG
"""Has the worker write its threads' stacks. A process without a handler ignores it."""

WITHDRAW = "withdraw"
"""The last argument of a report that withdraws the one before."""

_OVERRUN = 10
"""The share of the limit, as its reciprocal, by which a look may be late before it shows a pause."""

_REPORT_S = 10.0
_DUMP_S = 1.0
_END_S = 5.0
_SAY_S = 0.5
_BEATS = 65_536


@dataclass(frozen=True, slots=True)
class Watched:
    """The worker: its process id, its name, after how many silent seconds it is killed, and how that is reported."""

    pid: int
    name: str
    limit_s: float
    report: Sequence[str]


def command(pid: int, name: str, limit_s: float, report: Sequence[str]) -> list[str]:
    """The argument list of a watchdog for the process `pid`, which must be its parent.

    `report` is the argument list of the program that reports a kill; name, process id and seconds are appended, and
    `WITHDRAW` if the worker was not killed.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(pid), name, str(limit_s), *report]


def main(arguments: Sequence[str]) -> None:
    """Watch until the worker has ended, or is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the worker, which is watched until it has ended
    pid, name, limit_s, *report = arguments
    worker = Watched(int(pid), name, float(limit_s), report)
    while (silent_s := _until_silent(worker)) is not None:
        _report(worker, silent_s)
        if not _has_beaten():
            _end(worker, silent_s)
            return
        _say("WARNING", f"{worker.name} has recovered after {silent_s:.1f} s of silence, and is not killed")
        _report(worker, silent_s, WITHDRAW)


def _until_silent(worker: Watched) -> float | None:
    """Return the seconds of silence once they reach the limit; `None` once the worker has ended."""
    look_s = worker.limit_s / LOOKS
    heard_at = looked_at = time.monotonic()
    while _lives(worker):
        ready, _, _ = select.select([0], [], [], look_s)
        if ready and not os.read(0, _BEATS):
            return None
        now = time.monotonic()
        paused_s = now - looked_at - look_s
        if paused_s > worker.limit_s / _OVERRUN:
            _say("WARNING", f"was paused for {paused_s:.1f} s itself: the silence of {worker.name} counts from now")
        if ready or paused_s > worker.limit_s / _OVERRUN:
            heard_at = now
        if now - heard_at >= worker.limit_s:
            return now - heard_at
        looked_at = now
    return None


def _lives(worker: Watched) -> bool:
    """Whether the worker lives: an orphan gets another parent."""
    return os.getppid() == worker.pid


def _report(worker: Watched, silent_s: float, *withdraw: str) -> None:
    """Report that the worker is killed, or withdraw that.

    Before the kill: this process may end with the worker, by its supervisor or as part of its container.
    """
    arguments = [*worker.report, worker.name, str(worker.pid), f"{silent_s:.1f}", *withdraw]
    try:
        subprocess.run(arguments, stdin=subprocess.DEVNULL, timeout=_REPORT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _say("WARNING", f"the kill of {worker.name} was not {'withdrawn' if withdraw else 'reported'}: {error}")


def _has_beaten() -> bool:
    """Whether a heartbeat has arrived since the last look; reads it. False at EOF."""
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready and os.read(0, _BEATS))


def _end(worker: Watched, silent_s: float) -> None:
    """Log the kill, have the worker write its stacks, and kill it."""
    _say(
        "ERROR",
        f"{worker.name} (process {worker.pid}) is killed: no thread of it has run for {silent_s:.1f} s. "
        f"It is stopped, or a call holds Python's interpreter lock; the stacks of its threads follow",
    )
    _signal(worker, DUMP_SIGNAL)
    _wait(worker, _DUMP_S)
    _signal(worker, signal.SIGKILL)
    _wait(worker, _END_S)
    if _lives(worker):
        _say("ERROR", f"{worker.name} (process {worker.pid}) has not ended {_END_S:g} s after SIGKILL")


def _signal(worker: Watched, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if _lives(worker):
            os.kill(worker.pid, number)


def _wait(worker: Watched, seconds: float) -> None:
    """Return when the worker has ended, or the time is up."""
    until = time.monotonic() + seconds
    while _lives(worker) and time.monotonic() < until:
        time.sleep(_DUMP_S / 20)


def _say(level: str, text: str) -> None:
    """Write a line in the form of the worker's log; a log that is not read must not keep the worker alive."""
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1_000):03d}"
    line = f"{stamp} {level} perdure.workers.watchdog.process - {text}\n".encode(errors="replace")
    saying = threading.Thread(target=_write, args=(line,), daemon=True)
    saying.start()
    saying.join(_SAY_S)


def _write(line: bytes) -> None:
    with suppress(OSError):
        os.write(2, line)


if __name__ == "__main__":
    main(sys.argv[1:])
