"""Runs PostgreSQL and Redis from Python wheels, for machines that have neither server.

    from perdure.servers import postgres, redis

    with postgres.start(settings.data_dir / "postgres") as server:
        create_engine(server.url)

`start` joins the server that runs in the directory, or starts one. `Running.stop` stops the server unless another
process still uses it. `find` returns a running server and never starts one; commands use `find` to connect to the
servers of `perdure up`. `python -m perdure.servers postgres DIRECTORY` keeps a server running in the foreground, for a
supervisor.

A file lock shows whether a server is alive. The server's processes inherit the lock on `server.lock`, and the kernel
releases it when the last of them ends. This works even after a crash or a reboot, and if a process id is reused.
perdure sends a signal to a process only if the process's command line identifies it as the server.

`lifecycle` implements start, find and stop for both servers. `postgres` and `redis` have the code for one server each.
The modules of `process` handle the account root, directories without search permission, long socket paths, and the
death of a parent process.
"""

from perdure.servers.errors import EmbeddedServerError
from perdure.servers.lifecycle import Endpoint, Running

__all__ = ["EmbeddedServerError", "Endpoint", "Running"]
