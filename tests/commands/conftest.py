"""`perdure` as a person starts it: a process of its own, in a directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.repository.source import ROOT

Environment = dict[str, str]
Perdure = Callable[..., "subprocess.CompletedProcess[str]"]

COMMAND = (sys.executable, "-P", "-m", "workers.commands")


def _environment(tmp_path: Path) -> Environment:
    """This process's, without what would configure perdure or colour its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "FLOWER_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "PERDURE_DATA_DIR": str(tmp_path / "data"), "NO_COLOR": "1"}


@pytest.fixture
def nowhere(tmp_path: Path) -> Environment:
    """The environment of somebody who has not started anything."""
    return _environment(tmp_path)


@pytest.fixture
def environment(tmp_path: Path, database_url: str, redis_url: str) -> Environment:
    """The environment of somebody whose servers run."""
    return {**_environment(tmp_path), "PERDURE_DATABASE_URL": database_url, "PERDURE_REDIS_URL": redis_url}


@pytest.fixture
def perdure(environment: Environment, tmp_path: Path) -> Perdure:
    """Runs one command to its end."""

    def run(*arguments: str, stdin: str = "", env: Environment | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            env=environment if env is None else env,
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


@pytest.fixture
def working(environment: Environment, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that runs; it is stopped as an operator would stop it."""
    process = subprocess.Popen(
        [*COMMAND, "worker", "--concurrency", "4"], env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    yield process
    process.terminate()
    try:
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
