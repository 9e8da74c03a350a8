"""Replies that are POSTed to a real HTTP server: signatures, allowed addresses, time limits and errors."""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from standardwebhooks import Webhook, WebhookVerificationError

from perdure.channels.callback import UrlCarrier
from perdure.clock import MovedClock
from perdure.network.reply_urls import Reachable
from perdure.network.unlogged import unlogged
from perdure.network.webhook_signatures import make_secret, parse_secrets, signed_headers
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable

KEY = b"the key"
WEBHOOK_KEY = b"a key of thirty-two bytes for it"
SECRET = "whsec_" + base64.b64encode(WEBHOOK_KEY).decode()
MESSAGE_ID = "01a20501-43ff-7152-9363-e4b105eb51a7"
LOOPBACK = Reachable.parse(["127.0.0.0/8"])
BODY = '{"reply": "été"}'.encode()


def carrier(reachable: Reachable = LOOPBACK, **given: Any) -> UrlCarrier:
    """A carrier. By default it may connect to loopback, where the tests' receivers listen."""
    return UrlCarrier([WEBHOOK_KEY], reachable, **given)


class Receiver(ThreadingHTTPServer):
    """An HTTP server that records each POST request and answers with `status`."""

    daemon_threads = True
    status = 204

    tls: ssl.SSLContext | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, dict[str, str], bytes]] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, over TLS if this server has a certificate."""
        connection, address = super().get_request()
        return (self.tls.wrap_socket(connection, server_side=True) if self.tls else connection), address

    @property
    def url(self) -> str:
        """The receiver's URL."""
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
        """Log nothing to the test's output."""


@contextlib.contextmanager
def _running() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A running receiver."""
    with _running() as server:
        yield server


def test_the_body_arrives_as_it_is_with_its_signature(receiver: Receiver) -> None:
    """The receiver gets exactly the bytes that were signed, so it can verify the signature of the raw body."""
    carrier().carry({"url": receiver.url}, BODY, MESSAGE_ID)

    ((path, headers, body),) = receiver.received
    assert (path, body, headers["Content-Type"]) == ("/callback?for=ann", BODY, "application/json")
    assert {name for name in headers if "signature" in name.lower()} == {
        "webhook-signature"
    }  # one that cannot be replayed
    Webhook(SECRET).verify(body, headers)


def test_the_url_is_not_logged(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """A receiver's URL may contain a secret. HTTP clients log URLs at INFO, also for an application's own requests."""
    url = f"{receiver.url}?token=secret"
    with caplog.at_level(logging.DEBUG):
        carrier().carry({"url": url}, b"{}", "m1")
        assert "secret" not in caplog.text
        httpx2.post(receiver.url, content=b"{}")
    assert [each.name for each in caplog.records if each.levelno == logging.INFO] == ["httpx2"]


def test_the_url_of_requests_that_overlap_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The URLs of two requests may be equal. The first request's end lets the second one's be logged no more."""
    first, second = (unlogged(httpx2.Request("POST", "https://a.example/secret")) for _ in range(2))
    asked = logging.getLogger("httpx2")
    with caplog.at_level(logging.INFO):
        asked.info("HTTP Request: %s %s", first.method, first.url)
        del first
        asked.info("HTTP Request: %s %s", second.method, second.url)
    assert caplog.text == ""


def test_any_library_of_standard_webhooks_verifies_it(receiver: Receiver) -> None:
    """The Standard Webhooks library accepts the signature of each attempt. It rejects a changed body or timestamp.

    Each attempt has the delivery's id and a new timestamp.
    """
    now = int(time.time())
    times = iter([now - 100.9, now + 0.5])
    to_url = carrier(clock=lambda: next(times))
    for _ in range(2):
        to_url.carry({"url": receiver.url}, BODY, MESSAGE_ID)

    sent = [headers for _, headers, _ in receiver.received]
    assert [headers["webhook-id"] for headers in sent] == [MESSAGE_ID] * 2
    assert [headers["webhook-timestamp"] for headers in sent] == [str(now - 101), str(now)]
    for headers in sent:
        assert Webhook(SECRET).verify(BODY, headers) == {"reply": "\u00e9t\u00e9"}
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(BODY.replace(b"r", b"R", 1), headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(BODY, {**headers, "webhook-timestamp": str(now - 50)})


def test_each_secret_signs_while_they_rotate(receiver: Receiver) -> None:
    """During a rotation, receivers can verify the signature with the old or the new secret."""
    new = make_secret()
    keys = parse_secrets(f"{new}, {SECRET}")
    UrlCarrier(keys, LOOPBACK).carry({"url": receiver.url}, BODY, MESSAGE_ID)
    ((_, headers, body),) = receiver.received
    for secret in (new, SECRET):
        Webhook(secret).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(make_secret()).verify(body, headers)


def test_the_signature_equals_the_specifications_example() -> None:
    """For the example from the Standard Webhooks libraries, the computed signature equals the published one."""
    keys = parse_secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed_headers(keys, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_410_response_ends_the_attempts(receiver: Receiver) -> None:
    """A 410 response makes the delivery undeliverable."""
    receiver.status = 410
    with pytest.raises(Undeliverable, match="410"):
        carrier().carry({"url": receiver.url}, BODY, MESSAGE_ID)


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}/", "http://2130706433:{}/", "http://[::ffff:7f00:1]:{}/"])
def test_a_stored_url_that_is_not_allowed_gets_no_request(receiver: Receiver, url: str) -> None:
    """A forbidden URL in a stored delivery is refused. The carrier opens no connection."""
    with pytest.raises(Undeliverable, match="is not a public address"):
        carrier(Reachable()).carry({"url": url.format(receiver.server_port)}, BODY, MESSAGE_ID)
    assert receiver.received == []


def _resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Make the n-th look-up of a name return the n-th of `answers`; returns the list of looked-up names."""
    real = socket.getaddrinfo
    looked_up: list[str] = []

    def look_up(host: str, port: int, *rest: Any, **named: Any) -> Any:
        if not host.endswith(".example"):
            return real(host, port, *rest, **named)
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers[len(looked_up) - 1]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return looked_up


def test_a_name_of_a_private_address_gets_no_request(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name that resolves to a private address gets no request, even if it also has a public address.

    Each attempt resolves the name again.
    """
    _resolving(monkeypatch, *[["127.0.0.1"], ["93.184.216.34", "127.0.0.1"]] * 2)
    breakers = Breakers(BreakerSettings(failure_threshold=1, cooldown_s=60), MovedClock())
    to_url = carrier(Reachable(), breakers=breakers)
    for _ in range(4):
        with pytest.raises(DeliveryFailed, match=r"127\.0\.0\.1 is not a public address") as failed:
            to_url.carry({"url": f"http://a.example:{receiver.server_port}/"}, BODY, MESSAGE_ID)
        assert not isinstance(failed.value, Undeliverable)
    assert receiver.received == []


def test_the_connection_goes_to_the_address_that_was_checked(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt resolves the name once and connects to the checked address. The `Host` header contains the name."""
    looked_up = _resolving(monkeypatch, ["127.0.0.1"], ["10.9.9.9"])
    carrier().carry({"url": f"http://user:pass@a.example:{receiver.server_port}/x"}, BODY, MESSAGE_ID)
    assert looked_up == ["a.example"]
    ((path, headers, _),) = receiver.received
    assert (path, headers["Host"]) == ("/x", f"a.example:{receiver.server_port}")
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"user:pass").decode()


def test_the_next_address_is_tried_if_one_refuses(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one address of a receiver refuses the connection, the carrier tries the next address."""
    _resolving(monkeypatch, ["127.0.0.9", "127.0.0.1"])
    carrier().carry({"url": f"http://a.example:{receiver.server_port}/"}, BODY, MESSAGE_ID)
    assert len(receiver.received) == 1


def test_no_proxy_of_the_environment_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies from environment variables are ignored, because a proxy would resolve the name again."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    carrier().carry({"url": receiver.url}, BODY, MESSAGE_ID)
    assert len(receiver.received) == 1


def test_a_certificate_is_checked_against_the_name(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The certificate must match the URL's host name, although the carrier connects to a resolved address."""
    chain, key = _certificate("a.example", tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(chain, key)
    receiver.tls = served
    monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    _resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.1"])
    to_url = carrier()
    to_url.carry({"url": f"https://a.example:{receiver.server_port}/"}, BODY, MESSAGE_ID)
    assert len(receiver.received) == 1
    with pytest.raises(DeliveryFailed, match="CERTIFICATE_VERIFY_FAILED"):
        to_url.carry({"url": f"https://b.example:{receiver.server_port}/"}, BODY, MESSAGE_ID)
    assert len(receiver.received) == 1


def _certificate(name: str, directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for `name`, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain, private = directory / "chain.pem", directory / "key.pem"
    chain.write_bytes(made.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return chain, private


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 410, 429, 500, 503])
def test_any_status_but_2xx_is_a_failed_attempt(receiver: Receiver, status: int) -> None:
    """Any status other than 2xx is a failed attempt. A redirect is not followed."""
    receiver.status = status

    with pytest.raises(DeliveryFailed, match=str(status)):
        carrier().carry({"url": receiver.url}, BODY, MESSAGE_ID)
    assert len(receiver.received) == 1


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Run a server that handles one connection with `answer`; yields the server's URL."""
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
    """Send nothing."""
    over.wait(30)


def drip(connection: socket.socket, over: threading.Event) -> None:
    """Send an endless header."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not over.wait(0.02):
        connection.sendall(b"x")


def nonsense(connection: socket.socket, _over: threading.Event) -> None:
    """Answer with bytes that are not HTTP."""
    connection.recv(65_536)
    connection.sendall(b"what?\r\n\r\n")


@pytest.mark.parametrize("behaviour", [silence, drip])
def test_an_attempt_ends_in_time_however_slow_the_receiver(behaviour: Any) -> None:
    """The time limit covers a whole attempt. A limit per read would let a slow receiver hold a thread for ever."""
    with answering(behaviour) as url:
        began = time.monotonic()
        with pytest.raises(DeliveryFailed, match=r"0\.3 s"):
            carrier(timeout_s=0.3).carry({"url": url}, BODY, MESSAGE_ID)
        assert time.monotonic() - began < 5


def test_a_success_does_not_wait_for_its_body() -> None:
    """A 2xx response is a success as soon as its headers arrive. The carrier does not read the body."""

    def endless(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        over.wait(30)

    with answering(endless) as url:
        carrier(timeout_s=5).carry({"url": url}, BODY, MESSAGE_ID)


def test_an_answer_that_is_not_http_is_a_failure() -> None:
    """A response that is not HTTP is a failed attempt."""
    with answering(nonsense) as url, pytest.raises(DeliveryFailed):
        carrier(timeout_s=5).carry({"url": url}, BODY, MESSAGE_ID)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/", "http://127.0.0.1:99999/", "http://[::1/", "http://exa mple/", "https://\u2603.invalid/"],
)
def test_an_unreachable_or_malformed_url_is_a_failure(url: str) -> None:
    """A stored URL that is unreachable or malformed raises `DeliveryFailed`, never another exception."""
    with pytest.raises(DeliveryFailed):
        carrier(timeout_s=5).carry({"url": url}, BODY, MESSAGE_ID)


def test_a_name_that_does_not_resolve_in_time_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit includes name resolution, although the resolver's thread cannot be interrupted."""
    over = threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        over.wait(20)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    began = time.monotonic()
    with pytest.raises(DeliveryFailed):
        carrier(timeout_s=0.3).carry({"url": "http://receiver.test/"}, BODY, MESSAGE_ID)
    took_s = time.monotonic() - began
    over.set()
    assert took_s < 5


def test_each_host_has_its_own_breaker(receiver: Receiver) -> None:
    """Repeated failures open the breaker of one host and port. After a reset of the breaker, requests are sent again.

    While the breaker is open, the carrier sends no requests to this host and port. Other ports still get requests.
    """
    breakers = Breakers(BreakerSettings(failure_threshold=2, cooldown_s=60), MovedClock())
    to_url = carrier(timeout_s=5, breakers=breakers)
    receiver.status = 503
    for _ in range(2):
        with pytest.raises(DeliveryFailed, match="503"):
            to_url.carry({"url": receiver.url}, BODY, MESSAGE_ID)
    with pytest.raises(NotAsked) as refused:
        to_url.carry({"url": receiver.url}, BODY, MESSAGE_ID)
    assert 0 < refused.value.retry_s <= 60
    assert len(receiver.received) == 2
    with _running() as other:
        to_url.carry({"url": other.url}, BODY, MESSAGE_ID)
        assert len(other.received) == 1
    assert breakers.reset(f"webhook:127.0.0.1:{receiver.server_port}").failure_count == 0
    receiver.status = 204
    to_url.carry({"url": receiver.url}, BODY, MESSAGE_ID)
    assert len(receiver.received) == 3


def test_a_request_that_is_refused_opens_no_breaker(receiver: Receiver) -> None:
    """The host's breaker does not count a client error such as 404, so other deliveries to the host continue."""
    breakers = Breakers(BreakerSettings(failure_threshold=1, cooldown_s=60), MovedClock())
    to_url = carrier(timeout_s=5, breakers=breakers)
    receiver.status = 404
    for _ in range(3):
        with pytest.raises(DeliveryFailed, match="404"):
            to_url.carry({"url": receiver.url}, BODY, MESSAGE_ID)
    assert len(receiver.received) == 3
