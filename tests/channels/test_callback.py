"""Replies to a URL, posted to a real receiver: signed, bounded, and told apart when they did not arrive."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from perdure.channels.callback import UrlCarrier
from perdure.clock import MovedClock
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings
from perdure.turns.outbox import DeliveryFailed, NotAsked

KEY = b"the key"
BODY = '{"reply": "été"}'.encode()


class Receiver(ThreadingHTTPServer):
    """Answers every POST with `status` and remembers what came."""

    daemon_threads = True
    status = 204

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self.server_port}/callback?for=ann"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, dict(self.headers), body))
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """The test's output is not a log."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that runs."""
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_body_arrives_as_it_is_with_its_signature(receiver: Receiver) -> None:
    """The receiver recomputes the signature over the raw bytes: not one may differ."""
    UrlCarrier(KEY).carry({"url": receiver.url}, BODY)

    ((path, headers, body),) = receiver.received
    assert (path, body, headers["Content-Type"]) == ("/callback?for=ann", BODY, "application/json")
    assert headers["X-Perdure-Signature"] == "sha256=" + hmac.new(KEY, BODY, hashlib.sha256).hexdigest()


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 410, 429, 500, 503])
def test_anything_but_success_has_not_arrived(receiver: Receiver, status: int) -> None:
    """A redirect is not followed: the signed body goes where it was sent and nowhere else."""
    receiver.status = status

    with pytest.raises(DeliveryFailed, match=str(status)):
        UrlCarrier(KEY).carry({"url": receiver.url}, BODY)
    assert len(receiver.received) == 1


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """The URL of a server that answers one connection in its own way, until the block ends."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                answer(connection, over)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            over.set()
            thread.join(timeout=10)


def silence(_connection: socket.socket, over: threading.Event) -> None:
    """Take the request and say nothing."""
    over.wait(30)


def drip(connection: socket.socket, over: threading.Event) -> None:
    """Say something all the time, and never come to the point."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not over.wait(0.02):
        connection.sendall(b"x")


def nonsense(connection: socket.socket, _over: threading.Event) -> None:
    """Answer in no language of the web."""
    connection.recv(65_536)
    connection.sendall(b"what?\r\n\r\n")


@pytest.mark.parametrize("behaviour", [silence, drip])
def test_an_attempt_ends_in_time_however_slow_the_receiver(behaviour: Any) -> None:
    """A bound on each wait alone would let a dripping receiver hold a worker's thread for ever."""
    with answering(behaviour) as url:
        began = time.monotonic()
        with pytest.raises(DeliveryFailed, match=r"0\.3 s"):
            UrlCarrier(KEY, timeout_s=0.3).carry({"url": url}, BODY)
        assert time.monotonic() - began < 5


def test_a_success_does_not_wait_for_its_body() -> None:
    """The status says it all; a body without end is nobody's to read."""

    def endless(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        over.wait(30)

    with answering(endless) as url:
        UrlCarrier(KEY, timeout_s=5).carry({"url": url}, BODY)


def test_nonsense_has_not_arrived() -> None:
    """What is no HTTP is no success."""
    with answering(nonsense) as url, pytest.raises(DeliveryFailed):
        UrlCarrier(KEY, timeout_s=5).carry({"url": url}, BODY)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/", "http://127.0.0.1:99999/", "http://[::1/", "http://exa mple/", "https://\u2603.invalid/"],
)
def test_an_address_that_leads_nowhere_has_not_arrived(url: str) -> None:
    """Accept checks no more than the beginning of a URL; the rest shows here, as a failed attempt."""
    with pytest.raises(DeliveryFailed):
        UrlCarrier(KEY, timeout_s=5).carry({"url": url}, BODY)


def test_a_name_that_does_not_resolve_in_time_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit covers the look-up, though the resolver's thread cannot be interrupted."""
    over = threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        over.wait(20)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    began = time.monotonic()
    with pytest.raises(DeliveryFailed):
        UrlCarrier(KEY, timeout_s=0.3).carry({"url": "http://receiver.test/"}, BODY)
    took_s = time.monotonic() - began
    over.set()
    assert took_s < 5


def test_each_host_has_its_own_breaker(receiver: Receiver) -> None:
    """A receiver that keeps failing is not asked for a while; another port is another receiver, and is."""
    breakers = Breakers(BreakerSettings(failure_threshold=2, cooldown_s=60), MovedClock())
    carrier = UrlCarrier(KEY, timeout_s=5, breakers=breakers)
    receiver.status = 503
    for _ in range(2):
        with pytest.raises(DeliveryFailed, match="503"):
            carrier.carry({"url": receiver.url}, BODY)
    with pytest.raises(NotAsked) as refused:
        carrier.carry({"url": receiver.url}, BODY)
    assert 0 < refused.value.retry_s <= 60
    assert len(receiver.received) == 2
    assert breakers.reset(f"webhook:127.0.0.1:{receiver.server_port}").failure_count == 0
    receiver.status = 204
    carrier.carry({"url": receiver.url}, BODY)
    assert len(receiver.received) == 3


def test_a_request_that_is_refused_opens_no_breaker(receiver: Receiver) -> None:
    """One turn's unknown path (404) says nothing about the host: other deliveries go on."""
    breakers = Breakers(BreakerSettings(failure_threshold=1, cooldown_s=60), MovedClock())
    carrier = UrlCarrier(KEY, timeout_s=5, breakers=breakers)
    receiver.status = 404
    for _ in range(3):
        with pytest.raises(DeliveryFailed, match="404"):
            carrier.carry({"url": receiver.url}, BODY)
    assert len(receiver.received) == 3
