"""A RabbitMQ for the tests: a node with its own name, ports and directories, on loopback.

The program comes from the system (Debian: `rabbitmq-server`). If it is not installed, the tests that need it are
skipped; in continuous integration (`CI=true`) they fail.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from celery import Celery
from kombu import Connection

from tests.processes.faults import wait_until
from tests.processes.gateway import free_port
from tests.programs import missing

_PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_CONTROL = _PROGRAM.with_name("rabbitmqctl")
_START_S = 100.0


class Rabbit:
    """A broker that a test may kill and start again. `url` stays the same."""

    def __init__(self, directory: Path) -> None:
        if not _PROGRAM.exists():
            missing("rabbitmq-server is not installed")
        self._directory = directory
        port, names_port = free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        self._environment = {**os.environ, **_environment(directory, port, names_port)}
        self._names = subprocess.Popen(
            ["epmd", "-port", str(names_port), "-address", "127.0.0.1"], env=self._environment, start_new_session=True
        )
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the broker with the data of its directory, and wait until it answers."""
        with (self._directory / "out").open("ab") as out:
            self._server = subprocess.Popen(
                [str(_PROGRAM)], env=self._environment, stdout=out, stderr=out, start_new_session=True
            )
        wait_until(partial(_answers, self.url, self._server), "RabbitMQ answers", _START_S)

    def alarm(self, *, on: bool) -> None:
        """Set the limit of memory, so that the alarm for memory begins or ends at once."""
        self.control("set_vm_memory_high_watermark", "0.00001" if on else "0.9")

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl`; returns its output."""
        argv = [str(_CONTROL), "-q", *arguments]
        return subprocess.run(
            argv, env=self._environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def kill(self) -> None:
        """End the broker with SIGKILL, if it was started."""
        if self._server is not None:
            _end(self._server)

    def close(self) -> None:
        """End the broker and its server of names."""
        self.kill()
        _end(self._names)


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Run a broker within the block; yields its URL."""
    broker = Rabbit(directory)
    try:
        broker.start()
        yield broker.url
    finally:
        broker.close()


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
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(directory / "none"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def _answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    if server.poll() is not None:
        raise AssertionError(f"RabbitMQ ended with status {server.returncode}")
    try:
        with Connection(url, connect_timeout=5) as connection:
            connection.connect()
    except OSError:
        return False
    return True
