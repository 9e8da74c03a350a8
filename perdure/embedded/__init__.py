"""PostgreSQL and Redis from wheels, run under the data directory, for machines without servers.

    from perdure.embedded import postgres, redis

    with postgres.start(settings.data_dir / "postgres") as server:
        create_engine(server.url)

`start` joins the server of that directory or starts it; the last user to stop it ends the server. `find` changes
nothing; commands use it while `perdure up` runs. `python -m perdure.embedded postgres DIRECTORY` keeps a server running
in the foreground, for a supervisor.

The invariant: only the kernel decides whether a server is alive. Each server inherits a file lock (`server.lock`) that
the kernel releases with the last of its processes, so a crash, a reboot or a reused process id leaves no ambiguous
state. No process is signalled before its command line has identified it as that server.

`lifecycle` has start, find and stop for both, `postgres` and `redis` their specifics. The modules of `process` handle
root, closed directories, long paths and the death of a parent.
"""

from perdure.embedded.errors import EmbeddedServerError
from perdure.embedded.lifecycle import Endpoint, Running

__all__ = ["EmbeddedServerError", "Endpoint", "Running"]
