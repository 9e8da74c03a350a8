"""Processes of an installation under test that a test ends and starts again, such as `perdure gateway`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx2

from tests.cli.conftest import Perdure
from tests.processes.faults import wait_until

PATIENCE_S = 60.0


class CommandProcess:
    """A process `perdure COMMAND` that a test ends and starts again."""

    def __init__(self, perdure: Perdure, log: Path = Path(os.devnull)) -> None:
        self._perdure = perdure
        self._log = log
        self._process: BaseProcess | None = None

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._process is not None
        assert self._process.is_alive(), f"the process has ended with {self._process.exitcode}"
        assert self._process.pid is not None
        return self._process.pid

    def run(self, *command: str) -> None:
        """Start the process."""
        self._process = self._perdure.start(*command, stdout=self._log, stderr=self._log)

    def stop(self) -> None:
        """Stop the process with SIGTERM; it must exit with 0."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        """End the process with SIGKILL, if it was started."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


class GatewayProcess(CommandProcess):
    """A gateway that a test kills and starts again, on the same free port of loopback."""

    def __init__(self, perdure: Perdure, log: Path = Path(os.devnull)) -> None:
        super().__init__(perdure, log)
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the gateway, and wait until it answers."""
        self.run("gateway", "--port", str(self._port))
        wait_until(lambda: _lives(self.url), "the gateway answers", PATIENCE_S)


def free_port() -> int:
    """A port of loopback on which no program listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def serving(perdure: Perdure) -> Iterator[str]:
    """Run a gateway within the block, and end it with SIGTERM; yields the gateway's URL."""
    gateway = GatewayProcess(perdure)
    try:
        gateway.start()
        yield gateway.url
        gateway.stop()
    finally:
        gateway.kill()


def _lives(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz").is_success
    except httpx2.TransportError:
        return False
