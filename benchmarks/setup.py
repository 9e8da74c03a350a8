"""Throw-away servers, databases and processes for the benchmark's sections.

All sections run with perdure's default settings: the caller's `PERDURE_*` variables and `.env`
are ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import NullPool

from perdure.database.migrate import migrate
from perdure.servers.process import launch
from perdure.servers.redis import client_url
from perdure.servers.throwaway import Servers, servers

ROOT = Path(__file__).resolve().parent.parent

_EXIT_S = 60
_LOOK_S = 0.25
_FOREIGN = ("PERDURE_", "OPENAI_", "ANTHROPIC_", "CELERY_")
_ENTRY_POINTS = """[perdure.models]
benchmark = benchmarks.agents:model
crashes = benchmarks.crashes.on_perdure:model
"""
_METADATA = "Metadata-Version: 2.1\nName: perdure-benchmarks\nVersion: 0\n"

Progress = Callable[[str], None]
"""Shows a line about the current step."""


class BenchmarkFailed(Exception):
    """A process died or a wait timed out, so a section has no result."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """PostgreSQL's own counts: transactions committed in one database, and bytes of WAL (all databases)."""

    commits: int
    wal_bytes: int

    def __sub__(self, earlier: Ledger) -> Ledger:
        return Ledger(self.commits - earlier.commits, self.wal_bytes - earlier.wal_bytes)


@dataclass(frozen=True)
class Setup:
    """The servers of a run. If `quick` is true, sections do a tenth of the work."""

    servers: Servers
    progress: Progress
    quick: bool

    def scaled(self, count: int) -> int:
        """Return `count`, or a tenth of `count` if `quick` is true."""
        return max(count // 10, 1) if self.quick else count

    @contextmanager
    def database(self, name: str, *, tables: bool = True) -> Iterator[URL]:
        """Flush Redis and create the database `name`; drop the database after the block.

        If `tables` is true, the database has perdure's tables.
        """
        url = make_url(self.servers.postgres.url)
        administer(url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", f"CREATE DATABASE {name}")
        client = redis.Redis.from_url(client_url(self.servers.redis.url))
        client.flushall()
        client.close()
        if tables:
            migrate(url.set(database=name))
        yield url.set(database=name)
        administer(url, f"DROP DATABASE {name} WITH (FORCE)")

    def environment(self, database: URL, **variables: str) -> dict[str, str]:
        """The environment of a perdure process: default settings with the benchmark's agent and model."""
        own = {
            "PERDURE_DATABASE_URL": database.render_as_string(hide_password=False),
            "PERDURE_REDIS_URL": self.servers.redis.url,
            "PERDURE_DATA_DIR": str(self.servers.directory),
            "PERDURE_AGENTS": "benchmarks.agents",
            "PERDURE_MODEL": "benchmark:0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(self._site())]),
        }
        return {**os.environ, **own, **variables}

    @contextmanager
    def process(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
    ) -> Iterator[psutil.Popen]:
        """Run `python -m MODULE ARGUMENTS`, and send it SIGTERM after the block. Output is logged unless it is piped.

        Raises:
            BenchmarkFailed: the process failed or had to be killed.
        """
        argv = launch.command([sys.executable, "-m", module, *arguments], dies_with_parent=True)
        path = self.servers.directory / f"{module}.log"
        with path.open("wb") as log:
            output = log if stdout is None else stdout
            running = psutil.Popen(
                argv, env=dict(environment), cwd=self.servers.directory, stdin=stdin, stdout=output, stderr=log
            )
            try:
                yield running
            finally:
                status = _end(running)
        if status not in (0, -signal.SIGTERM):
            raise BenchmarkFailed(f"{module} ended with {status}:\n{path.read_text(errors='replace')[-2_000:]}")

    def finish(self, process: psutil.Popen, timeout_s: float, doing: Callable[[], str]) -> None:
        """Wait until a process ends, showing `doing()` as progress.

        Raises:
            BenchmarkFailed: the process is still running after `timeout_s` seconds.
        """
        until(lambda: process.poll() is not None, timeout_s, lambda: self.progress(doing()))

    def _site(self) -> Path:
        """Create a directory with the metadata of an installed package, and return its path.

        The metadata declares the entry point of the benchmark's model.
        """
        site = self.servers.directory / "site"
        declared = site / "perdure_benchmarks-0.dist-info"
        declared.mkdir(parents=True, exist_ok=True)
        (declared / "METADATA").write_text(_METADATA)
        (declared / "entry_points.txt").write_text(_ENTRY_POINTS)
        return site


@contextmanager
def setup(progress: Progress, *, quick: bool) -> Iterator[Setup]:
    """Start the servers; stop and remove them after the block. Removes the caller's settings from `os.environ`."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    progress("starting PostgreSQL and Redis")
    with servers() as running:
        yield Setup(running, progress, quick)


def until(ready: Callable[[], bool], timeout_s: float, while_waiting: Callable[[], None] = lambda: None) -> None:
    """Poll until `ready()` is true.

    Raises:
        BenchmarkFailed: `ready()` is still false after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"the awaited condition was not met within {timeout_s:g} s")
        while_waiting()
        time.sleep(_LOOK_S)


@contextmanager
def connected(url: URL) -> Iterator[Connection]:
    """An autocommit connection to the database, without a pool."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        yield connection


def administer(url: URL, *statements: str) -> None:
    """Run statements in the database `postgres` of the server."""
    with connected(url.set(database="postgres")) as connection:
        for statement in statements:
            connection.execute(text(statement))


def scalar(url: URL, sql: str, **parameters: Any) -> Any:
    """The single value that the query `sql` returns."""
    with connected(url) as connection:
        return connection.execute(text(sql), parameters).scalar_one()


def ledger(url: URL) -> Ledger:
    """The transactions committed in the database, and the server's WAL position in bytes.

    Close all other connections first: a backend may not report its counts to PostgreSQL until it ends.
    """
    with connected(url.set(database="postgres")) as connection:
        counted: Sequence[Any] = connection.execute(
            text(
                "SELECT xact_commit, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint "
                "FROM pg_stat_database WHERE datname = :name"
            ),
            {"name": url.database},
        ).one()
    return Ledger(counted[0], counted[1])


def _end(process: psutil.Popen) -> int:
    if process.poll() is None:
        process.terminate()
    try:
        return int(process.wait(_EXIT_S))
    except psutil.TimeoutExpired as error:
        process.kill()
        process.wait()
        raise BenchmarkFailed(f"process {process.pid} did not exit within {_EXIT_S} s of SIGTERM") from error
