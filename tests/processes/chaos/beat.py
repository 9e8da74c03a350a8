"""A Celery beat of an installation under test: a process `perdure beat`."""

from __future__ import annotations

import re
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.cli.conftest import Perdure
from tests.processes.faults import wait_until

_PATIENCE_S = 60.0
_RUNS = "beat runs until SIGTERM"
_FIRED = re.compile(r"fired (\d+) slots since the start")


class Beat:
    """A beat that a test ends and starts again."""

    def __init__(self, perdure: Perdure, log: Path) -> None:
        self._perdure = perdure
        self._log = log
        self._process: BaseProcess | None = None

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._process is not None
        assert self._process.is_alive(), f"the beat has ended with {self._process.exitcode}"
        assert self._process.pid is not None
        return self._process.pid

    @property
    def fired(self) -> int:
        """How many slots it has fired in its runs that ended with SIGTERM."""
        return sum(map(int, _FIRED.findall(self._logs())))

    def start(self) -> None:
        """Start the beat, and wait until it runs."""
        before = len(self._logs())
        self._process = self._perdure.start("beat", stdout=self._log, stderr=self._log)
        wait_until(lambda: _RUNS in self._logs()[before:], "the beat runs", _PATIENCE_S)

    def stop(self) -> None:
        """Stop the beat with SIGTERM; it must exit with 0."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(_PATIENCE_S)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        """End the beat with SIGKILL, if it was started."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _logs(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""
