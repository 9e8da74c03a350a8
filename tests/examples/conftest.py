"""Starts the programs of an example."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from tests import forked
from tests.processes.faults import wait_until

ROOT = Path(__file__).resolve().parents[2]
QUEUES = "ingress,turns,deliveries,sessions,memory,maintenance"


def run_script() -> None:
    """Run the script that `sys.argv` names, as `python SCRIPT` does."""
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_path(sys.argv[0], run_name="__main__")


class Example:
    """An example: its directory, its environment and its running programs."""

    def __init__(self, name: str, environment: Mapping[str, str], scratch: Path) -> None:
        self.directory = ROOT / "examples" / name
        self.environment = dict(environment)
        self._scratch = scratch
        self._programs: list[BaseProcess] = []

    def start(self, main: str, *argv: str) -> Path:
        """Start the program `main` (`module:function`) with `argv`. Returns the path of its log."""
        log = self._scratch / f"{len(self._programs)}.log"
        program = forked.Program(main, argv, self.environment, self.directory, stdout=log, stderr=log)
        self._programs.append(forked.start(program))
        return log

    def script(self, *argv: str) -> None:
        """Run a script of the example and wait for its end. The script must succeed."""
        self.script_of("tests.examples.conftest:run_script", *argv)

    def script_of(self, main: str, *argv: str) -> None:
        """Run the program `main` (`module:function`) and wait for its end. The program must succeed."""
        log = self.start(main, *argv)
        program = self._programs[-1]
        program.join(30)
        assert program.exitcode == 0, log.read_text()

    def worker(self, application: str, queues: str) -> Path:
        """Start a Celery worker with a thread pool and wait until it is ready. Returns the path of its log."""
        options = ("-P", "threads", "-c", "8", "-Q", queues, "-l", "info")
        log = self.start("celery.__main__:main", "celery", "-A", application, "worker", *options)
        wait_until(lambda: " ready." in log.read_text() if log.exists() else None, f"{application} is ready")
        return log

    def wait_for_death(self) -> None:
        """Wait until the program that was started last has ended, in whatever way."""
        program = self._programs.pop()
        program.join(60)
        assert not program.is_alive()
        program.close()

    def serve(self, application: str) -> str:
        """Serve an ASGI application with uvicorn. Returns its URL."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = self.start("uvicorn:main", "uvicorn", application, "--port", str(port))
        wait_until(lambda: "Uvicorn running" in log.read_text() if log.exists() else None, f"{application} is served")
        return f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        """Send SIGTERM to the programs. Each must end with status 0 or by SIGTERM."""
        for program in self._programs:
            if program.is_alive() and program.pid is not None:
                os.kill(program.pid, signal.SIGTERM)
        for program in self._programs:
            program.join(20)
        ended = [program.exitcode for program in self._programs]
        for program in self._programs:
            program.kill()
            program.join()
            program.close()
        assert all(status in {0, -signal.SIGTERM} for status in ended), ended


@pytest.fixture
def example(request: pytest.FixtureRequest, database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Example]:
    """The example that the constant `EXAMPLE` of the test's module names."""
    url = sqlalchemy.make_url(database_url)
    kept: dict[str, Any] = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    environment = {
        **kept,
        "PERDURE_DATABASE_URL": database_url,
        "PERDURE_REDIS_URL": redis_url,
        "PERDURE_DATA_DIR": str(tmp_path / "data"),
        "PERDURE_MODEL": "offline",
        "SHOP_BROKER_URL": redis_url,
        "SHOP_DATABASE_URL": database_url,
        "PGHOST": str(url.host or url.query["host"]),
        "PGPORT": str(url.port or 5432),
        "PGUSER": str(url.username),
        "PGPASSWORD": str(url.password or ""),
        "PGDATABASE": str(url.database),
        "PYTHONPATH": str(ROOT),  # to import `run_script` from the package `tests`
    }
    made = Example(request.module.EXAMPLE, environment, tmp_path)
    yield made
    made.stop()
