"""Fixtures that run `perdure` as a user does: in a separate process and directory.

The processes are forked from a process that has imported the libraries (see `forked`). `whole=True` starts a new
interpreter instead, as the installed command does.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests import forked
from tests.repository.source import ROOT

Environment = dict[str, str]

_PATIENCE_S = 60.0

COMMAND = (sys.executable, "-P", "-m", "perdure.cli")


def _environment(tmp_path: Path) -> Environment:
    """The test process's environment without its `PERDURE_*` and `FLOWER_*` variables, but with a data directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "FLOWER_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "PERDURE_DATA_DIR": str(tmp_path / "data"), "NO_COLOR": "1"}


@pytest.fixture
def nowhere(tmp_path: Path) -> Environment:
    """The environment of a user who has started no servers."""
    return _environment(tmp_path)


@pytest.fixture
def environment(tmp_path: Path, database_url: str, redis_url: str) -> Environment:
    """The environment of a user whose servers run."""
    return {**_environment(tmp_path), "PERDURE_DATABASE_URL": database_url, "PERDURE_REDIS_URL": redis_url}


class Perdure:
    """Runs `perdure` in a directory. Each call may pass another environment."""

    def __init__(self, environment: Environment, directory: Path, program: str = "perdure.cli:main") -> None:
        self._environment = environment
        self._directory = directory
        self._program = program
        self._numbers = itertools.count(1)

    def __call__(
        self, *arguments: str, stdin: str = "", env: Environment | None = None, whole: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        environment = self._environment if env is None else env
        if whole:
            return self._interpreter(arguments, environment)
        given, out, err = (self._directory / f"{stream}-{next(self._numbers)}" for stream in ("in", "out", "err"))
        given.write_text(stdin)
        process = self.start(*arguments, stdin=given, stdout=out, stderr=err, env=environment)
        process.join(_PATIENCE_S)
        assert process.exitcode is not None, f"{arguments} has not ended"
        status = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())

    def start(self, *arguments: str, env: Environment | None = None, **streams: Path) -> BaseProcess:
        """Start one command. The keys of `streams` are `stdin`, `stdout` and `stderr`."""
        environment = self._environment if env is None else env
        argv = ["perdure", *arguments]
        return forked.start(forked.Program(self._program, argv, environment, self._directory, **streams))

    def _interpreter(self, arguments: Sequence[str], environment: Environment) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            env=environment,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )


@pytest.fixture
def perdure(environment: Environment, tmp_path: Path) -> Perdure:
    """Runs `perdure` in the test's directory, with running servers."""
    return Perdure(environment, tmp_path)


@pytest.fixture
def working(perdure: Perdure) -> Iterator[BaseProcess]:
    """A running worker. It is stopped with SIGTERM and must exit with status 0."""
    process = perdure.start("worker", "--concurrency", "4")
    yield process
    process.terminate()
    process.join(_PATIENCE_S)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
