"""How the gateway, beat and a waiting `perdure send` handle SIGTERM and SIGINT. `test_shutdown` tests workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest

from perdure.turns.cancel import cancel
from tests.cli.conftest import Perdure
from tests.processes.faults import wait_until
from tests.processes.installation import Installation

PATIENT = {"PERDURE_SHUTDOWN__DRAIN_S": "50", "PERDURE_SHUTDOWN__HARD_EXIT_S": "60"}
HELLO = {"user_id": "ann", "text": "hello"}
HALF_A_REQUEST = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\nExpect: 100-continue\r\n\r\n{"

_PATIENCE_S = 60.0
_PHASE = re.compile(r"shutdown, (\d) of 4: (.*)")
_SECONDS = re.compile(r"[\d.]+ s")

pytestmark = pytest.mark.long


class Running:
    """A running command and its output."""

    def __init__(self, perdure: Perdure, directory: Path, *arguments: str, **environment: str) -> None:
        self._paths = {stream: directory / f"{arguments[0]}.{stream}" for stream in ("stdout", "stderr")}
        self.process: BaseProcess = perdure.start(*arguments, env=environment, **self._paths)

    def wait_for(self, text: str) -> None:
        """Wait until the command has written `text` to stderr."""
        wait_until(lambda: text in self.output(), f"{text!r} is written", _PATIENCE_S)

    def output(self, stream: str = "stderr") -> str:
        """The command's output so far."""
        path = self._paths[stream]
        return path.read_text() if path.exists() else ""

    def phases(self) -> list[str]:
        """The texts of the shutdown phases in the command's log, with `#` in place of each duration."""
        return [_SECONDS.sub("# s", text) for _, text in sorted(_PHASE.findall(self.output()))]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ends(self) -> int | None:
        """Wait for the process to end; returns its exit status, or minus the number of the signal that killed it."""
        self.process.join(_PATIENCE_S)
        return self.process.exitcode


@pytest.fixture
def perdure(installation: Installation, tmp_path: Path) -> Perdure:
    """Runs commands on this installation, which has no worker."""
    return Perdure(installation.environment, tmp_path)


@contextmanager
def running(installation: Installation, perdure: Perdure, *arguments: str, **settings: str) -> Iterator[Running]:
    """Run a command within the block."""
    environment = {**installation.environment, **settings}
    made = Running(perdure, installation.directory, *arguments, **environment)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.join()


@contextmanager
def serving(installation: Installation, perdure: Perdure, **settings: str) -> Iterator[tuple[Running, int]]:
    """Run a gateway within the block; yields the command and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(installation, perdure, "gateway", "--port", str(port), **settings) as gateway:
        wait_until(lambda: _answers(port), "the gateway answers", _PATIENCE_S)
        yield gateway, port


class Waiting:
    """A client that sends a message, and waits in a second request until the message's turn is settled."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1"
        self.turn_id: str = httpx2.post(f"{self._url}/messages", json=HELLO).json()["turn_id"]
        self._socket = socket.create_connection(("127.0.0.1", port), _PATIENCE_S)
        # The gateway sends `100 Continue` when it begins to wait for the turn to settle.
        self._socket.sendall(
            f"GET /v1/turns/{self.turn_id}?wait=60 HTTP/1.1\r\nHost: localhost\r\n"
            "Content-Length: 1\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert self._socket.recv(65_536).startswith(b"HTTP/1.1 100"), "the gateway waits for the turn"

    def refused(self) -> Any:
        """Send one more message; returns the response."""
        return httpx2.post(f"{self._url}/messages", json=HELLO)

    def status(self) -> str:
        """The turn's status in the response to the waiting request."""
        with self._socket, self._socket.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return str(json.loads(body)["status"])


def _answers(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("hastened", [False, True])
def test_a_gateway_logs_each_phase_of_its_shutdown(
    installation: Installation, perdure: Perdure, *, hastened: bool
) -> None:
    """A gateway that drains refuses messages. A waiting request ends when its turn settles, or at a second signal."""
    with serving(installation, perdure, **PATIENT) as (gateway, port):
        waiting = Waiting(port)
        gateway.signal(signal.SIGINT if hastened else signal.SIGTERM)
        gateway.wait_for("1 of 4")
        refused = waiting.refused()
        if hastened:
            gateway.signal(signal.SIGTERM)
        else:
            cancel(installation.runtime, UUID(waiting.turn_id))

        assert waiting.status() == ("accepted" if hastened else "cancelled")
        assert gateway.ends() == 0

    assert (refused.status_code, refused.json()["code"]) == (503, "UNAVAILABLE")
    assert int(refused.headers["Retry-After"]) >= 1
    phases = gateway.phases()
    settled, unsettled = (0, 1) if hastened else (1, 0)
    assert phases[:2] == [
        "refuses new messages; 1 requests wait for a turn, for at most # s",
        f"drained; {settled} waits ended, {unsettled} are answered with their turn's current status (# s)",
    ]
    assert re.fullmatch(r"closed \d+ connections, cut off 0 of them \(# s\)", phases[2])
    assert phases[3:] == ["closed (# s; # s in all)"]


@pytest.mark.parametrize("hard_exit_s", [2, 60])
def test_a_hanging_response_makes_the_status_1(installation: Installation, perdure: Perdure, hard_exit_s: int) -> None:
    """The gateway exits with status 1 if it cuts off a response, or if it reaches the hard limit first."""
    settings = {"PERDURE_SHUTDOWN__DRAIN_S": "1", "PERDURE_SHUTDOWN__HARD_EXIT_S": str(hard_exit_s)}
    with serving(installation, perdure, **settings) as (gateway, port), socket.socket() as mute:
        mute.connect(("127.0.0.1", port))
        mute.sendall(HALF_A_REQUEST)
        assert mute.recv(65_536).startswith(b"HTTP/1.1 100"), "the gateway waits for the rest"
        gateway.signal(signal.SIGTERM)
        assert gateway.ends() == 1

    if hard_exit_s == 2:
        assert "the hard limit is reached" in gateway.output()
        assert len(gateway.phases()) == 2
    else:
        assert re.fullmatch(r"closed \d+ connections, cut off 1 of them \(# s\)", gateway.phases()[2])
        assert len(gateway.phases()) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_beat_logs_its_shutdown(installation: Installation, perdure: Perdure, number: signal.Signals) -> None:
    """Beat exits with status 0 and logs one line. A second signal changes nothing."""
    with running(installation, perdure, "beat") as beat:
        beat.wait_for("beat runs until")
        beat.signal(number)
        beat.signal(number)
        assert beat.ends() == 0

    (line,) = [line for line in beat.output().splitlines() if "shutdown: " in line]
    assert re.search(r"fires no more; fired \d+ slots since the start, closed \([\d.]+ s\)", line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_send_prints_the_turns_id(
    installation: Installation, perdure: Perdure, number: signal.Signals
) -> None:
    """An interrupted `perdure send` prints the turn's id, because the message is accepted and its reply comes later."""
    with running(installation, perdure, "send", "hello", "--wait", "60", "--json") as sending:
        wait_until(lambda: installation.query("SELECT turn_id FROM turns"), "the message is accepted", _PATIENCE_S)
        sending.signal(number)
        assert sending.ends() == 1

    turn_id = str(installation.query("SELECT turn_id FROM turns")[0].turn_id)
    assert sending.output().endswith(
        f"perdure: Interrupted: turn {turn_id} is accepted. Look again with `perdure turns show {turn_id}`.\n"
    )
    assert json.loads(sending.output("stdout"))["turn_id"] == turn_id
