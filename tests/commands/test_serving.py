"""The gateway on a real socket: waits that end with the server, or with the client."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from perdure.channels.http.app import create_app
from perdure.runtime import Runtime
from perdure.turns import inbox
from perdure.turns.incoming import Incoming
from workers.commands.failing import Failure
from workers.commands.listening import bind
from workers.commands.serving import Server

_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Served:
    """A gateway that runs in a thread."""

    app: FastAPI
    server: Server
    address: tuple[str, int]

    def interrupt(self) -> None:
        """A signal comes."""
        self.server.handle_exit(signal.SIGTERM, None)

    def waiting(self) -> int:
        """Turns that somebody waits for."""
        return len(self.app.state.gateway._watch._waiting)

    def until(self, waiting: int) -> None:
        """Return when so many turns are waited for."""
        deadline, pause = time.monotonic() + _PATIENCE_S, threading.Event()
        while self.waiting() != waiting:
            assert time.monotonic() < deadline, f"{self.waiting()} turns are waited for"
            pause.wait(0.01)

    def until_refused(self) -> None:
        """Return when the gateway says, on a connection of its own, that it takes nothing in."""
        deadline, pause = time.monotonic() + _PATIENCE_S, threading.Event()
        while httpx2.get("http://{}:{}/readyz".format(*self.address)).status_code != 503:
            assert time.monotonic() < deadline, "the gateway goes on"
            pause.wait(0.01)


@pytest.fixture
def served(runtime: Runtime) -> Iterator[Served]:
    """A gateway on a port of the system's choice."""
    app = create_app(runtime, lambda: True)
    listener = bind("127.0.0.1", 0, "--port")
    server = Server(app, lambda: None)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield Served(app, server, listener.getsockname())
    server.should_exit = True
    thread.join(timeout=_PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def path(runtime: Runtime) -> str:
    """Where a turn that nobody runs is waited for."""
    return f"/v1/turns/{inbox.accept(runtime, Incoming(user_id='ann', text='hello')).turn_id}?wait=60"


def test_a_shutdown_answers_whoever_waits(served: Served, path: str) -> None:
    """A second signal has them answered at once, with the turn's present status: callers are not cut off."""
    host, port = served.address
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(httpx2.get(f"http://{host}:{port}{path}", timeout=60)))
    waiting.start()
    served.until(waiting=1)
    served.interrupt()
    served.until_refused()
    served.interrupt()
    waiting.join(timeout=_PATIENCE_S)

    assert (answers[0].status_code, answers[0].json()["status"]) == (200, "accepted")


def test_a_client_that_hangs_up_is_waited_for_no_more(served: Served, path: str) -> None:
    """Else the turns that nobody asks about any more would be looked up for ever."""
    with socket.create_connection(served.address) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        served.until(waiting=1)

    served.until(waiting=0)


def test_a_body_that_is_far_too_long_is_answered(served: Served) -> None:
    """A client that sends all before it reads must find the answer, not a connection that was reset."""
    client = http.client.HTTPConnection(*served.address, timeout=_PATIENCE_S)
    client.request("POST", "/v1/messages", b" " * (20 * 2**20))
    answer = client.getresponse()

    assert (answer.status, json.load(answer)["code"]) == (413, "TOO_LARGE")
    client.close()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_probe_may_ask_without_a_body(served: Served, path: str) -> None:
    """Load balancers ask with HEAD."""
    host, port = served.address
    assert (
        httpx2.head(f"http://{host}:{port}{path}").status_code == httpx2.get(f"http://{host}:{port}{path}").status_code
    )


def test_an_address_that_is_none_is_said_to_be_none() -> None:
    """Another port would not help."""
    with pytest.raises(Failure, match="it is no address"):
        bind("a..b", 0, "--port")
