"""PostgreSQL and Redis in a temporary directory, for tests and benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.servers import postgres, redis
from perdure.servers.lifecycle import Running
from perdure.servers.process import sockets


@dataclass(frozen=True, slots=True)
class Servers:
    """A private PostgreSQL and Redis, and their directory."""

    directory: Path
    postgres: Running
    redis: Running


@contextmanager
def servers(parent: Path | None = None) -> Iterator[Servers]:
    """Start PostgreSQL and Redis in a new directory under `parent`.

    After the block, stops both servers and removes the directory. `parent` defaults to the system's temporary
    directory.

    Raises:
        EmbeddedServerError: a server cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=parent) as name:
        directory = Path(name)
        homes = directory / "postgres", directory / "redis"
        try:
            with postgres.start(homes[0]) as database, redis.start(homes[1]) as broker:
                yield Servers(directory, database, broker)
        finally:
            for home in homes:
                sockets.discard(home)
