"""pytest-celery's nodes without Docker: each container is a process.

A worker is a process `celery -A perdure worker` with its own session and process group (see `forked`). A Redis node is
perdure's embedded Redis with its own directory.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestSetup, CeleryTestWorker
from redis import Redis
from sqlalchemy.engine import URL, make_url

from perdure.database.migrate import migrate
from perdure.servers import postgres, redis
from perdure.servers.lifecycle import Running
from tests import forked
from tests.databases import ORDINARY, admit_ordinary_role, prepare_for_ordinary_role
from tests.processes.faults import wait_until

_QUIET = ["--without-gossip", "--without-mingle"]

groups: set[int] = set()
"""The process groups of the started workers, without those that were found empty. After the tests, none may be left."""


def left_over() -> list[psutil.Process]:
    """The processes in `groups` that still run."""
    return [process for process in psutil.process_iter() if _group(process.pid) in groups and not has_ended(process)]


class ProcessContainer:
    """The part of a pytest-docker-tools container that pytest-celery's nodes use, implemented with processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = name

    @property
    def pid(self) -> int:
        """The id of the main process."""
        raise NotImplementedError

    @property
    def status(self) -> str:
        """`running` or `exited`."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the process, for the first time or again."""
        raise NotImplementedError

    def wait(self, timeout_s: float = 20.0) -> int | None:
        """Wait until the main process has ended; returns its exit status, if known."""
        raise NotImplementedError

    def signal(self, number: signals.Signals) -> None:
        """Send a signal to the main process, without waiting for its effect."""
        os.kill(self.pid, number)

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal to the main process; after SIGKILL or SIGTERM, wait for its end."""
        number = signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)
        os.kill(self.pid, number)
        if number in (signals.SIGKILL, signals.SIGTERM):
            self.wait()

    def restart(self, timeout: float = 20.0) -> None:
        """Kill the process if it runs, then start it again."""
        if self.status == "running":
            self.kill("SIGKILL")
        self.start()

    def reload(self) -> None:
        """Do nothing: no state is cached."""


class WorkerContainer(ProcessContainer):
    """A worker process of the Celery application `application`."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        directory: Path,
        options: Sequence[str] = (),
        application: str = "perdure",
    ) -> None:
        super().__init__(name)
        self._log = directory / f"{name}.log"
        self._is_perdures = application == "perdure"
        quiet = _QUIET if self._is_perdures else ()
        argv = ["celery", "-A", application, "worker", "-l", "info", "-n", f"{name}@%h", *quiet, *options]
        self._program = forked.Program(
            "celery.__main__:main", argv, environment, directory, stdout=self._log, stderr=self._log
        )
        self._process: BaseProcess | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The id of the worker's process and of its process group."""
        if self._process is None or self._process.pid is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    @property
    def status(self) -> str:
        """`running` or `exited`."""
        return "running" if self._process is not None and self._process.is_alive() else "exited"

    def start(self) -> None:
        """Start the worker, without waiting until it consumes."""
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        if self._process is not None and self._is_perdures:
            _forget_if_empty(self.pid)  # else, what a killed worker has started must end by itself
        elif self._process is not None:
            _end_group(self.pid)  # the pool's processes of a killed worker of Celery stay
        self._process = forked.start(self._program)
        groups.add(self.pid)

    def wait(self, timeout_s: float = 20.0) -> int | None:
        """Wait until the worker has ended; returns its exit status, which is negative after a signal."""
        if self._process is None:
            return None
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise AssertionError(f"{self.name} did not end within {timeout_s:g} s")
        return self._process.exitcode

    def logs(self) -> str:
        """The log of all runs of the worker."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def ready(self) -> bool:
        """Wait until the worker consumes; fails the test if it does not."""
        wait_until(lambda: " ready." in self.logs()[self._log_start :], f"{self.name} is ready")
        return True

    def teardown(self) -> None:
        """Kill the worker and all processes that it started."""
        if self._process is None:
            return
        self._process.kill()  # in case the worker has not created its process group yet
        self.wait()
        _end_group(self.pid)
        self._process.close()
        self._process = None


class RedisContainer(ProcessContainer):
    """An embedded Redis in its own directory."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name)
        self._directory = directory
        self._runs: list[Running] = []
        self.start()

    @property
    def url(self) -> str:
        """The URL in the form that kombu expects."""
        return self._runs[-1].url

    @property
    def celeryconfig(self) -> dict[str, str]:
        """The URLs for pytest-celery, which are equal for tests and for containers."""
        return {"url": self.url, "host_url": self.url}

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        return self._runs[-1].pid

    @property
    def status(self) -> str:
        """`running` or `exited`."""
        return "running" if _lives(self.pid) else "exited"

    def start(self) -> None:
        """Start the server with the data of its append-only file."""
        self._runs.append(redis.start(self._directory))

    def wait(self, timeout_s: float = 20.0) -> int | None:
        """Wait until the server has ended."""
        wait_until(lambda: self.status == "exited", f"{self.name} ends", timeout_s)
        return None

    def flush(self) -> None:
        """Delete all keys."""
        client = Redis.from_url(redis.client_url(self.url), socket_timeout=10)
        client.flushall()
        client.close()

    def logs(self) -> str:
        """The server's log."""
        return (self._directory / "server.log").read_text(errors="replace")

    def ready(self) -> bool:
        """Always true, because `start` waits until the server answers."""
        return True

    def teardown(self) -> None:
        """Stop the server, even if a test has paused it."""
        if self.status == "running":
            os.kill(self.pid, signals.SIGCONT)
        while self._runs:
            self._runs.pop().stop()


class PostgresServer:
    """A PostgreSQL server that a test may restart; it contains perdure's tables, which an ordinary role owns."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs: list[Running] = []
        self.start()
        prepare_for_ordinary_role(self.administrator)
        migrate(self.url)

    @property
    def administrator(self) -> URL:
        """The URL with the administrator's role."""
        return make_url(self._runs[-1].url)

    @property
    def url(self) -> str:
        """The URL for SQLAlchemy, with the ordinary role."""
        return self.administrator.set(username=ORDINARY).render_as_string(hide_password=False)

    def restart(self, number: signals.Signals) -> None:
        """End the server with a signal, then start it again with the same data directory."""
        self.end(number)
        self.start()

    def end(self, number: signals.Signals) -> None:
        """End the server with a signal."""
        os.kill(self._runs[-1].pid, number)
        wait_until(lambda: postgres.find(self._directory) is None, "PostgreSQL has ended", 60)

    def start(self) -> None:
        """Start the server again with the same data directory."""
        self._runs.append(postgres.start(self._directory))
        admit_ordinary_role(self.administrator)

    def stop(self) -> None:
        """Stop the server at the end of the tests."""
        while self._runs:
            self._runs.pop().stop()


class RedisBroker(CeleryTestBroker):  # type: ignore[misc]
    """Redis as the broker."""

    def teardown(self) -> None:
        """Do nothing: the backend stops the shared server."""


class RedisBackend(CeleryTestBackend):  # type: ignore[misc]
    """Redis as the result backend, on the broker's server."""


class Worker(CeleryTestWorker):  # type: ignore[misc]
    """A worker node whose container is a process."""

    container: WorkerContainer

    @property
    def pid(self) -> int:
        """The id of the worker's process."""
        return self.container.pid


class Setup(CeleryTestSetup):  # type: ignore[misc]
    """A setup whose application has only two settings, the URLs of the broker and the backend."""

    def teardown(self) -> None:
        """Close the application's connections."""
        self.app.close()


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signals.SIGKILL)
    except ProcessLookupError:
        groups.discard(group)
        return
    wait_until(lambda: _forget_if_empty(group), f"{group} ends")


def _forget_if_empty(group: int) -> bool:
    """Remove the group from `groups` if the group has no living process; returns whether the group was removed.

    An empty group is removed because the system may give the group's number to a process of another program.
    """
    if any(_group(each) == group and _lives(each) for each in psutil.pids()):
        return False
    groups.discard(group)
    return True


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _lives(pid: int) -> bool:
    try:
        return not has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended; a zombie counts as ended."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
