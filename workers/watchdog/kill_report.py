"""Reports a kill: `python -m perdure.workers.watchdog.kill_report WORKER PID SECONDS [withdraw]`.

The watchdog runs this program before it kills a worker. If the worker recovers during that run, the watchdog runs the
program again with `withdraw`. The program is separate because the watchdog imports only the standard library.
`PERDURE_REDIS_URL` is the address of the worker's Redis.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import redis

from perdure.assembly import redis_address
from perdure.resilience.kill_reports import Kills
from perdure.settings import Settings
from perdure.workers.watchdog.process import WITHDRAW


def main(arguments: Sequence[str]) -> int:
    """Add the report to Redis, or remove it; returns the exit status."""
    worker, pid, silent_s, *rest = arguments
    settings = Settings.load()
    kills = Kills(redis_address(settings), settings.redis_prefix)
    try:
        change = kills.withdraw if rest == [WITHDRAW] else kills.add
        change(worker, int(pid), float(silent_s))
    except redis.RedisError as error:
        sys.stderr.write(f"Redis does not accept the report: {error}\n")
        return 1
    finally:
        kills.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
