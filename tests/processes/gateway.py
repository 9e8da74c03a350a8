"""A gateway of an installation under test: a process `perdure gateway` on a free loopback port."""

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

_PATIENCE_S = 60.0


class GatewayProcess:
    """A gateway that a test kills and starts again, on the same port."""

    def __init__(self, perdure: Perdure, log: Path = Path(os.devnull)) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._perdure = perdure
        self._log = log
        self._process: BaseProcess | None = None

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._process is not None
        assert self._process.is_alive(), f"the gateway has ended with {self._process.exitcode}"
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Start the gateway, and wait until it answers."""
        self._process = self._perdure.start("gateway", "--port", str(self._port), stdout=self._log, stderr=self._log)
        wait_until(lambda: _lives(self.url), "the gateway answers", _PATIENCE_S)

    def stop(self) -> None:
        """Stop the gateway with SIGTERM; it must exit with 0."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(_PATIENCE_S)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        """End the gateway with SIGKILL, if it was started."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


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
