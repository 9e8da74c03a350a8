"""A gateway of an installation under test: `perdure gateway` in a process of its own, on a free port of loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from tests.cli.conftest import Perdure
from tests.processes.faults import wait_until

_PATIENCE_S = 60.0


@contextmanager
def serving(perdure: Perdure) -> Iterator[str]:
    """The gateway's URL, within the block; then it is stopped as an operator would stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process, url = perdure.start("gateway", "--port", str(port)), f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _lives(url), "the gateway lives", _PATIENCE_S)
        yield url
        process.terminate()
        process.join(_PATIENCE_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def _lives(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz").is_success
    except httpx2.TransportError:
        return False
