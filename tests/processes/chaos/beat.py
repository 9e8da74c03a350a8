"""A Celery beat of an installation under test: a process `perdure beat`."""

from __future__ import annotations

import re

from tests.processes.faults import wait_until
from tests.processes.gateway import PATIENCE_S, CommandProcess

_RUNS = "beat runs until SIGTERM"
_FIRED = re.compile(r"fired (\d+) slots since the start")


class Beat(CommandProcess):
    """A beat that a test ends and starts again."""

    @property
    def fired(self) -> int:
        """How many slots it has fired in its runs that ended with SIGTERM."""
        return sum(map(int, _FIRED.findall(self._logs())))

    def start(self) -> None:
        """Start the beat, and wait until it runs."""
        before = len(self._logs())
        self.run("beat")
        wait_until(lambda: _RUNS in self._logs()[before:], "the beat runs", PATIENCE_S)

    def _logs(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""
