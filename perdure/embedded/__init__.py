"""PostgreSQL and Redis out of wheels, run under the data directory for whoever has neither.

    from perdure.embedded import postgres, redis

    with postgres.start(settings.data_dir / "postgres") as server:
        create_engine(server.url)

`start` joins the server of that directory or starts it; the last of its users that stops
stops the server. `find` only looks, for commands that run beside `perdure up`. `python -m
perdure.embedded postgres DIRECTORY` keeps one running in the foreground, for a supervisor.

The law kept here: whether a server lives is asked of the kernel and of nobody else. Each
server inherits a file lock (`server.lock`) that ends with the last of its processes, so a
crash, a reboot or a process id that was given to someone else leaves no state to guess at;
and no process is signalled before its command line has proven it to be that server.

`lifecycle` holds start, find and stop for both; `postgres` and `redis` what is particular to
each; `account`, `programs`, `sockets` and `launch` what root, closed directories, long paths and
lost parents ask for.
"""

from perdure.embedded.errors import EmbeddedServerError
from perdure.embedded.lifecycle import Endpoint, Running

__all__ = ["EmbeddedServerError", "Endpoint", "Running"]
