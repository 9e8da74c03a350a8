"""PostgreSQL and Redis from wheels, run under the data directory of an installation that has no servers.

    from perdure.embedded import postgres, redis

    with postgres.start(settings.data_dir / "postgres") as server:
        create_engine(server.url)

`start` joins the server of that directory or starts it; the last process that uses it stops it. `find` only looks, for
commands that run next to `perdure up`. `python -m perdure.embedded postgres DIRECTORY` keeps one running in the
foreground, for a supervisor.

Only the kernel decides whether a server lives. Each server inherits a file lock (`server.lock`) that ends with the last
of its processes, so a crash, a reboot or a reused process id leaves no stale state. No process is signalled before its
command line has proven that it is that server.

lifecycle.py    start, find and stop
postgres.py, redis.py
process/        what root, closed directories, long paths and lost parents need
supervisor.py   keeps the processes of `perdure up` running
"""

from perdure.embedded.errors import EmbeddedServerError
from perdure.embedded.lifecycle import Endpoint, Running

__all__ = ["EmbeddedServerError", "Endpoint", "Running"]
