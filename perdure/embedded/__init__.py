"""PostgreSQL and Redis from wheels, run under the data directory, for machines that have no servers of their own.

    from perdure.embedded import postgres, redis

    with postgres.start(settings.data_dir / "postgres") as server:
        create_engine(server.url)

`start` joins the running server of that directory, or starts it. `stop` ends the server when the last process that uses
it calls `stop`. `find` only looks for a running server; commands call it while `perdure up` runs. `python -m
perdure.embedded postgres DIRECTORY` keeps a server running in the foreground, for a supervisor.

The invariant: only the kernel decides whether a server is alive. Each server inherits a file lock (`server.lock`),
which the kernel releases when the last of the server's processes ends. So a crash, a reboot or a reused process id
leaves no ambiguous state. perdure signals a process only if its command line identifies it as the server.

`lifecycle` has start, find and stop for both servers; `postgres` and `redis` have the code that differs. The modules of
`process` handle root, directories without search permission, long paths and the death of a parent.
"""

from perdure.embedded.errors import EmbeddedServerError
from perdure.embedded.lifecycle import Endpoint, Running

__all__ = ["EmbeddedServerError", "Endpoint", "Running"]
