"""The gateway on a real socket: waits, shutdowns, slow clients, malformed requests and limits."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.access.tenants import UserKey
from perdure.cli.errors import Failure
from perdure.cli.serve.connection_limits import Door, Phase, connection_limit
from perdure.cli.serve.listening import ACCEPTED_AT_ONCE, BACKLOG, bind
from perdure.runtime import Runtime
from perdure.turns.inbox import accept
from perdure.turns.inbox.incoming import Incoming
from tests.cli.conftest import Environment
from tests.cli.serving import PATIENCE_S, Served, connect, rest, serving

MOST, MOST_PER_ADDRESS = 40, 20
LIMITS_S = {Phase.HEADER: 0.5, Phase.BODY: 0.5}


@pytest.fixture
def served(runtime: Runtime) -> Iterator[Served]:
    """A gateway on a free port, with low limits."""
    with serving(runtime, Door(most=MOST, most_per_address=MOST_PER_ADDRESS, limits_s=LIMITS_S)) as made:
        yield made


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the length of the queue")
def test_connections_queue_while_the_event_loop_is_busy(served: Served) -> None:
    """The kernel queues more connections than the event loop accepts in one iteration."""
    served.until(0)
    assert httpx2.get("http://{}:{}/healthz".format(*served.address)).status_code == 200
    fields = struct.unpack_from("=8B6I", served.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32))
    longest_queue = fields[-1]  # `tcpi_sacked`, which is the backlog of a listening socket
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert longest_queue == min(BACKLOG, most)
    assert BACKLOG > ACCEPTED_AT_ONCE


@pytest.fixture
def path(runtime: Runtime) -> str:
    """The path of a request that waits for a turn. No worker runs the turn."""
    return f"/v1/turns/{accept.accept(runtime, Incoming(user=UserKey('ann'), text='hello')).turn_id}?wait=60"


def test_a_shutdown_answers_waiting_requests(served: Served, path: str) -> None:
    """After a second SIGTERM, the gateway answers waiting requests at once, with the turn's current status."""
    host, port = served.address
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(httpx2.get(f"http://{host}:{port}{path}", timeout=60)))
    waiting.start()
    served.until(waiting=1)
    served.interrupt()
    served.until_refused()
    served.interrupt()
    waiting.join(timeout=PATIENCE_S)

    assert (answers[0].status_code, answers[0].json()["status"]) == (200, "accepted")


def test_a_disconnect_ends_the_wait(served: Served, path: str) -> None:
    """If the client disconnects, the gateway stops waiting for the turn."""
    with socket.create_connection(served.address) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        served.until(waiting=1)

    served.until(waiting=0)


@pytest.mark.parametrize(("path", "mebibytes"), [("/v1/memory/search", 20), ("/v1/messages", 46)])
def test_a_body_that_is_far_too_long_is_answered(runtime: Runtime, path: str, mebibytes: int) -> None:
    """A client that sends a whole oversized body before it reads the response gets a 413, not a connection reset."""
    with (
        serving(runtime, Door(most=MOST)) as served,
        closing(http.client.HTTPConnection(*served.address, timeout=PATIENCE_S)) as client,
    ):
        client.request("POST", path, b" " * (mebibytes * 2**20))
        answer = client.getresponse()

        assert (answer.status, json.load(answer)["code"]) == (413, "TOO_LARGE")


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_probe_may_use_head(served: Served, path: str) -> None:
    """HEAD gets the same status as GET, because load balancers probe with HEAD."""
    host, port = served.address
    assert (
        httpx2.head(f"http://{host}:{port}{path}").status_code == httpx2.get(f"http://{host}:{port}{path}").status_code
    )


_STOPPED_EARLY = """
import gc, os, signal
gc.collect = lambda: os.kill(os.getpid(), int(os.environ["EARLY"]))
from perdure.cli import main
main()
"""
"""The code of a gateway that sends itself a signal after it has opened its socket and before its server runs."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_server_runs_ends_the_gateway(environment: Environment, number: signal.Signals) -> None:
    """A signal that arrives before the server runs ends the gateway, so that no SIGKILL is needed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-c", _STOPPED_EARLY, "gateway", "--port", str(port)]
    environment = {**environment, "EARLY": str(int(number))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "shutdown, 4 of 4" in ended.stderr


def test_a_host_that_does_not_resolve_is_reported() -> None:
    """An unresolvable host is reported as an invalid address."""
    with pytest.raises(Failure, match="is not an address"):
        bind("a..b", 0, "--port")


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "missing"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: loc", b"header"),
        (b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"body"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal", b"header"),
    ],
)
def test_a_request_that_does_not_arrive_is_answered_and_closed(served: Served, sent: bytes, missing: bytes) -> None:
    """An unfinished request gets a 408, and its connection is closed. Otherwise, clients could hold it for ever."""
    received = rest(connect(served.address, sent))

    assert b" 408 " in received
    assert b"The %b of the request did not arrive within 0.5 s." % missing in received
    assert b"content-type: application/problem+json" in received
    assert b"x-content-type-options: nosniff" in received


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused_in_the_gateways_form(served: Served, sent: bytes) -> None:
    """An invalid HTTP request gets a problem document with a code, instead of uvicorn's plain text."""
    head, _, body = rest(connect(served.address, sent)).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/problem+json" in head
    assert b"x-content-type-options: nosniff" in head
    assert json.loads(body)["code"] == "INVALID_REQUEST"


def test_an_upgrade_to_a_websocket_elsewhere_is_refused(served: Served) -> None:
    """A WebSocket upgrade is refused if its key is malformed or its route is not `/v1/ws`."""
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    for path, key, status in (("/v1/turns", "dGhlIHNhbXBsZSBub25jZQ==", 403), ("/v1/ws", "AAAA", 400)):
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{upgrade}Sec-WebSocket-Key: {key}\r\n\r\n"
        answer = rest(connect(served.address, head.encode()))
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


def test_a_connection_that_sends_nothing_is_closed(served: Served) -> None:
    """A connection that sends nothing is closed without an answer. Browsers open such connections in advance."""
    assert rest(connect(served.address)) == b""


def test_bytes_one_at_a_time_do_not_prolong_a_header(served: Served) -> None:
    """A client cannot prolong a header's time limit by sending one byte at a time."""
    with connect(served.address, b"GET /healthz HTTP/1.1\r\n") as client:
        client.settimeout(0.02)
        deadline, received = time.monotonic() + PATIENCE_S, b""
        while not received and time.monotonic() < deadline:
            client.sendall(b"X")
            try:
                received = client.recv(65_536)
            except TimeoutError:
                continue

    assert b" 408 " in received


def test_unfinished_headers_are_limited_per_address(served: Served) -> None:
    """If an address exceeds its limit of connections with slow headers, the oldest of them is closed."""
    half = [connect(served.address, b"GET /healthz HTTP/1.1\r\n") for _ in range(MOST_PER_ADDRESS + 1)]
    waiting = connect(served.address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 200 " in waiting.recv(65_536)

    assert rest(half[0]) == b"", "closed before its time limit"
    for client in (*half[1:], waiting):
        client.close()


def test_connections_beyond_the_limit_close_the_oldest_unfinished_one(served: Served, path: str) -> None:
    """Above the connection limit, the oldest connection with an unfinished header is closed.

    A connection whose request waits for a turn stays open.
    """
    host, port = served.address
    waiting = connect(served.address, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    served.until(waiting=1)
    half = [
        connect(served.address, b"GET /healthz HTTP/1.1\r\n", source=f"127.0.0.{2 + number // MOST_PER_ADDRESS}")
        for number in range(MOST)
    ]
    assert httpx2.get(f"http://{host}:{port}/healthz").status_code == 200
    assert rest(half[0]) == b""
    assert served.waiting() == 1
    for client in (*half[1:], waiting):
        client.close()


def test_a_kept_connection_answers_at_once(served: Served) -> None:
    """A response on a kept-alive connection arrives at once. Without `TCP_NODELAY`, it would take 40 ms more."""
    client = http.client.HTTPConnection(*served.address, timeout=PATIENCE_S)
    taken = []
    for _ in range(30):
        began = time.monotonic()
        client.request("GET", "/healthz")
        client.getresponse().read()
        taken.append(time.monotonic() - began)
    client.close()

    assert sorted(taken)[len(taken) // 2] < 0.02


@pytest.mark.parametrize(("descriptors", "connections"), [(65_536, 10_000), (1_024, 768), (256, 128)])
def test_descriptors_are_left_for_everything_else(descriptors: int, connections: int) -> None:
    """The connection limit leaves file descriptors for the database and Redis."""
    assert connection_limit(descriptors) == connections
