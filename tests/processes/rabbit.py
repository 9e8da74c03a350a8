"""A RabbitMQ for the tests: a node with its own name, ports and directories, on loopback.

The program comes from the system (Debian: `rabbitmq-server`). If it is not installed, the tests that need it are
skipped; in continuous integration (`CI=true`) they fail.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from celery import Celery
from kombu import Connection

from tests.processes.faults import wait_until
from tests.programs import missing

_PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_START_S = 100.0


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Run a broker within the block; yields its URL."""
    if not _PROGRAM.exists():
        missing("rabbitmq-server is not installed")
    port, names_port = _free_port(), _free_port()
    environment = {**os.environ, **_environment(directory, port, names_port)}
    names = subprocess.Popen(
        ["epmd", "-port", str(names_port), "-address", "127.0.0.1"], env=environment, start_new_session=True
    )
    with (directory / "out").open("wb") as out:
        server = subprocess.Popen([str(_PROGRAM)], env=environment, stdout=out, stderr=out, start_new_session=True)
    url = f"amqp://guest:guest@127.0.0.1:{port}//"
    try:
        wait_until(lambda: _answers(url, server), "RabbitMQ answers", _START_S)
        yield url
    finally:
        for process in (server, names):
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def empty_queues(app: Celery, url: str) -> None:
    """Purge the queues of `app`, so that the next test finds no message of this test."""
    with app.connection_for_write(url) as connection:
        for name in app.amqp.queues:
            with suppress(*connection.channel_errors), connection.channel() as channel:
                channel.queue_purge(name)


def _environment(directory: Path, port: int, names_port: int) -> dict[str, str]:
    (directory / "plugins").write_text("[].\n")
    return {
        "HOME": str(directory),
        "ERL_EPMD_PORT": str(names_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"perdure{secrets.token_hex(4)}@localhost",
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(_free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(directory / "none"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
    }


def _answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    if server.poll() is not None:
        raise AssertionError(f"RabbitMQ ended with status {server.returncode}")
    try:
        with Connection(url, connect_timeout=5) as connection:
            connection.connect()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
