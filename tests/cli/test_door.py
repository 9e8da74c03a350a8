"""A gateway process keeps answering while it has more unfinished requests than file descriptors."""

from __future__ import annotations

import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
import pytest

from perdure.workers import logs
from tests.cli.conftest import Environment
from tests.cli.test_connections import UPGRADES
from tests.processes.faults import wait_until

_DESCRIPTORS, _HALF_SENT = 1_024, 1_100
_PATIENCE_S = 60.0
_FEW_DESCRIPTORS = (
    "import resource, sys; "
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({_DESCRIPTORS}, {_DESCRIPTORS})); "
    "from perdure.cli import main; sys.exit(main())"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The path of the gateway's log."""
    return tmp_path / "gateway.log"


@pytest.fixture
def port(environment: Environment, tmp_path: Path, log: Path) -> Iterator[int]:
    """The port of a running gateway that may open few files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    command = [sys.executable, "-P", "-c", _FEW_DESCRIPTORS, "gateway", "--port", str(found)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=stream, start_new_session=True)
    try:
        wait_until(lambda: _lives(found), "the gateway is alive", _PATIENCE_S)
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (_DESCRIPTORS, _DESCRIPTORS)
        yield found
        process.terminate()
        assert process.wait(_PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive
def test_unfinished_requests_do_not_block_others(port: int, log: Path) -> None:
    """While 1,100 requests are unfinished, the gateway answers others within 2 s, and its log stays small."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8_192) if hard > 0 else 8_192, hard))
    slowest_s = 0.0
    with ExitStack() as stack:
        for number in range(_HALF_SENT):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S))
            client.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: loc")
            if number % 100 == 99:
                began = time.monotonic()
                assert _lives(port)
                slowest_s = max(slowest_s, time.monotonic() - began)

    assert slowest_s < 2
    assert log.stat().st_size < 100_000


@pytest.mark.long
def test_sockets_do_not_end_service(port: int) -> None:
    """More sockets than file descriptors do not end service. When they close, there is room again."""
    upgrade = UPGRADES["without an auth frame"][0]
    with ExitStack() as stack:
        for number in range(_HALF_SENT):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S))
            client.sendall(upgrade)
            client.recv(12)
            if number % 100 == 99:
                assert _lives(port)
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as client:
        client.sendall(upgrade)
        assert b" 101 " in client.recv(100)


def test_a_repeated_line_is_written_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """A repeated log line is written at most once a second, with the number of omitted lines.

    Otherwise, a repeated fault could fill the disk.
    """
    logger = logging.getLogger("perdure.test_door")
    logs.repeat_sparingly(logger.name)
    records = [logger.makeRecord(logger.name, logging.ERROR, "here", 1, "no room\non %d", (n,), None) for n in range(4)]
    for record, created in zip(records, (100.0, 100.1, 100.9, 101.0), strict=True):
        record.created = created
        logger.handle(record)
    logger.error("something else")

    assert [record.getMessage() for record in caplog.records] == [
        "no room\non 0",
        "no room\non 3 (2 more of these were not logged)",
        "something else",
    ]
    logger.filters.clear()


def _lives(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=5).is_success
    except httpx2.TransportError:
        return False
