"""Both servers in a temporary directory, for tests and benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.embedded import postgres, redis
from perdure.embedded.lifecycle import Running
from perdure.embedded.process import sockets


@dataclass(frozen=True, slots=True)
class Servers:
    """A PostgreSQL and a Redis of the caller's own, and the directory they live in."""

    directory: Path
    postgres: Running
    redis: Running


@contextmanager
def servers(parent: Path | None = None) -> Iterator[Servers]:
    """Start both in a new directory (under `parent`, else the temporary directory); stop and remove them at the end.

    Raises:
        EmbeddedServerError: one cannot be started.
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
