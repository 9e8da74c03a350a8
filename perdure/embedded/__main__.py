"""Keep one embedded server running: `python -m perdure.embedded postgres|redis DIRECTORY`.

For a supervisor: exits with status 1 when the server dies, so that a restart restarts the server. On SIGTERM or SIGINT
it exits, and stops the server if no other process uses it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from perdure.embedded import EmbeddedServerError, postgres, redis

_STARTS = {"postgres": postgres.start, "redis": redis.start}


class _Leave(Exception):
    """The supervisor asked this process to exit."""


def main(arguments: list[str]) -> int:
    """Start or join the server; return the exit status when the server has died or a signal has come."""
    if len(arguments) != 2 or arguments[0] not in _STARTS:  # noqa: PLR2004 - two arguments
        sys.stderr.write("usage: python -m perdure.embedded postgres|redis DIRECTORY\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        with _STARTS[arguments[0]](Path(arguments[1])) as server:
            sys.stdout.write(f"{arguments[0]} answers (process {server.pid})\n")
            sys.stdout.flush()
            server.wait()
    except _Leave:
        return 0
    except EmbeddedServerError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    sys.stderr.write(f"{arguments[0]} has ended; its log is {Path(arguments[1]) / 'server.log'}\n")
    return 1


def _leave(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # stopping the server cleanly has its own time limit
    raise _Leave


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
