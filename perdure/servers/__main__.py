"""Keeps one embedded server running: `python -m perdure.servers postgres|redis DIRECTORY`.

This process is meant to run under a supervisor. If the server dies, this process exits with status 1. The supervisor
then restarts this process, which starts the server again. On SIGTERM or SIGINT, this process stops the server, unless
another process uses it, and exits with status 0.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from perdure.servers import EmbeddedServerError, postgres, redis

_STARTS = {"postgres": postgres.start, "redis": redis.start}


class _Terminated(Exception):
    """SIGTERM or SIGINT arrived."""


def main(arguments: list[str]) -> int:
    """Start or join the server, and wait until it dies or a signal arrives; returns the exit status."""
    if len(arguments) != 2 or arguments[0] not in _STARTS:  # noqa: PLR2004 - two arguments
        sys.stderr.write("usage: python -m perdure.servers postgres|redis DIRECTORY\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    try:
        with _STARTS[arguments[0]](Path(arguments[1])) as server:
            sys.stdout.write(f"{arguments[0]} answers (process {server.pid})\n")
            sys.stdout.flush()
            server.wait()
    except _Terminated:
        return 0
    except EmbeddedServerError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    sys.stderr.write(f"{arguments[0]} has ended; its log is {Path(arguments[1]) / 'server.log'}\n")
    return 1


def _terminate(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # signals must not interrupt the server's shutdown, which is time-limited
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
