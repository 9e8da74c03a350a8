"""A call ends at its deadline or abort, whatever the server does."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2
import pytest

from perdure.errors import DeadlineExceeded
from perdure.models.endpoints import OPENAI
from perdure.models.protocol import CallAborted, ModelReply
from perdure.models.providers import transport as connection
from perdure.models.providers.model import EndpointModel
from perdure.testing.suites.models import QUESTION, ask, new_call
from tests.models.endpoints import configured
from tests.models.openai_server import OpenAIServer, Silence

AT_ONCE_S = 2.0
"""Seconds within which an abort must end a call. Every other timeout of the call is far longer."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """A pool of threads in which the tests run model calls."""
    with ThreadPoolExecutor(4) as running:
        yield running


def test_an_abort_wakes_a_thread_on_a_pooled_connection(
    model: EndpointModel, server: OpenAIServer, pool: ThreadPoolExecutor
) -> None:
    """An abort ends a call on a pooled connection that an earlier call opened."""
    ask(model, QUESTION)
    server.script(Silence())
    _aborted_at_once(model, pool, lambda: server.wait_for_requests(2))
    assert server.connections == 1
    assert ask(model, QUESTION).tool_calls, "the next call gets a connection that works"


def test_a_late_abort_does_not_affect_other_calls() -> None:
    """An abort after the end of a call leaves the connection open, because another call may use it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        held = connection.CallSocket(new_call())
        with held.waiting_on(ours, 1.0):
            theirs.sendall(b"a reply")
            assert ours.recv(100) == b"a reply"
        held.hang_up()
        theirs.sendall(b"another call's")
        assert ours.recv(100) == b"another call's"


def test_an_early_abort_ends_the_next_wait() -> None:
    """If a call is aborted between two waits on its socket, the next wait does not begin."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        held = connection.CallSocket(new_call())
        held.hang_up()
        with pytest.raises(OSError, match="was aborted"), held.waiting_on(ours, 1.0):
            pytest.fail("the wait began")


def test_an_abort_ends_a_connect(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, full_backlog: int) -> None:
    """A call can be aborted while it connects to a server that does not accept connections."""
    connecting = threading.Event()
    connect = connection._connect

    def noted(sock: socket.socket, address: object, timeout: float | None) -> socket.socket:
        connecting.set()
        return connect(sock, address, timeout)

    monkeypatch.setattr(connection, "_connect", noted)
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{full_backlog}/v1")
    _aborted_at_once(configured(OPENAI, "m"), pool, lambda: _happens(connecting))


def test_an_unresponsive_resolver_does_not_hold_a_call(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call ends at its abort or deadline, even if the DNS lookup, which cannot be interrupted, still runs."""
    resolving, resolved = threading.Event(), threading.Event()

    def silent(*_: object, **__: object) -> object:
        resolving.set()
        resolved.wait(60)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://silent.example/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
    model = configured(OPENAI, "m")
    _aborted_at_once(model, pool, lambda: _happens(resolving))
    with pytest.raises(DeadlineExceeded):
        ask(model, QUESTION, call=new_call(0.2))
    resolved.set()


def test_an_abort_ends_a_handshake(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call can be aborted during the TLS handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("OPENAI_BASE_URL", f"https://127.0.0.1:{listener.getsockname()[1]}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
        accepted: list[socket.socket] = []

        def accept() -> None:
            accepted.append(listener.accept()[0])
            accepted[0].recv(1)  # the ClientHello has arrived; the server does not respond to it

        _aborted_at_once(configured(OPENAI, "m"), pool, accept)
        accepted[0].close()


def test_an_abort_wakes_a_thread_that_reads_over_tls(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call over TLS can be aborted while its thread waits for the response."""
    monkeypatch.setattr(httpx2, "create_ssl_context", lambda: _anonymous(ssl.PROTOCOL_TLS_CLIENT))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("OPENAI_BASE_URL", f"https://127.0.0.1:{listener.getsockname()[1]}/v1")
        accepted: list[ssl.SSLSocket] = []

        def accept() -> None:
            plain, _ = listener.accept()
            accepted.append(_anonymous(ssl.PROTOCOL_TLS_SERVER).wrap_socket(plain, server_side=True))
            assert accepted[0].recv(4) == b"POST"

        _aborted_at_once(configured(OPENAI, "m"), pool, accept)
        accepted[0].close()


@pytest.mark.long
def test_hundreds_of_calls_wait_at_once(model: EndpointModel, server: OpenAIServer) -> None:
    """Hundreds of calls can wait for their responses at the same time. No call waits for a free connection."""
    server.script(*[Silence() for _ in range(300)])
    calls = [new_call() for _ in range(300)]
    with ThreadPoolExecutor(300) as many:
        waiting = [many.submit(ask, model, QUESTION, call=call) for call in calls]
        server.wait_for_requests(300, timeout_s=60)
        for call in calls:
            call.abort()
        errors = [each.exception(timeout=30) for each in waiting]
    assert {type(error) for error in errors} == {CallAborted}


def _aborted_at_once(model: EndpointModel, pool: ThreadPoolExecutor, until_it_waits: Callable[[], None]) -> None:
    call = new_call()
    waiting: Future[ModelReply] = pool.submit(ask, model, QUESTION, call=call)
    until_it_waits()
    began = time.monotonic()
    call.abort()
    assert isinstance(waiting.exception(timeout=30), CallAborted)
    assert time.monotonic() - began < AT_ONCE_S


def _happens(event: threading.Event) -> None:
    assert event.wait(10)


def _anonymous(protocol: int) -> ssl.SSLContext:
    """A TLS context without certificates, so that the tests need no private keys."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
    return context


@pytest.fixture
def full_backlog() -> Iterator[int]:
    """A port whose listen queue is full, so that attempts to connect hang."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        queued: list[socket.socket] = []
        for _ in range(64):
            client = socket.socket()
            queued.append(client)
            client.settimeout(0.2)
            try:
                client.connect(listener.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("this kernel's accept queue does not fill")
        yield listener.getsockname()[1]
        for client in queued:
            client.close()
