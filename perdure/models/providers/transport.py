"""An HTTP client whose connections another thread can abort.

A thread that is blocked in `recv` wakes if another thread shuts the socket down, but not if another thread closes the
response. A `CallSocket` therefore tracks the socket on which a call's thread is blocked, from the connect to the last
byte. The call's remaining time limits each wait, so a server that sends one byte a second cannot prolong the call.

The connections are those of a pool of httpcore2, with only its public interfaces.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

import httpcore2
import httpx2

from perdure.errors import InvalidResponse, PerdureError, ProviderError
from perdure.models.protocol import ModelCall
from perdure.network.dns import AddressInfo, look_up

CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds to connect to a server."""

MAX_BODY_BYTES = 64 * 1024**2
"""Maximum bytes of one response. The longest reply of any model, sent in small events, has half as many bytes."""

TRANSPORT_ERRORS = (
    httpcore2.TimeoutException,
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.UnsupportedProtocol,
)

FOREIGN_REDIRECT = "The model's server redirects to another origin, which is not followed."
COMPRESSED = "The model's server sent a compressed reply, which was not requested."

_KEEPALIVE_S = 30.0
_PORTS = {"http": 80, "https": 443}
_LAST_READ_S = 0.1
_MAX_REDIRECTS = 5
_REPEATED = frozenset({HTTPStatus.TEMPORARY_REDIRECT, HTTPStatus.PERMANENT_REDIRECT})
"""The redirects after which a request is repeated with its body."""


class CallSocket:
    """Tracks the socket on which a call's thread is blocked, so that another thread can shut the socket down."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._hung_up = False
        self._wait_limit_s = float("inf")

    def remaining(self) -> float:
        return self._call.remaining()

    def stop_waiting(self) -> None:
        self._wait_limit_s = _LAST_READ_S

    def wait_again(self) -> None:
        self._wait_limit_s = float("inf")

    def hang_up(self) -> None:
        """End the call from another thread. The call's thread wakes, and sends and receives no more data."""
        with self._lock:
            self._hung_up = True
            if self._socket is not None:
                _shut_down(self._socket)

    def addresses_of(self, host: str, port: int, timeout: float | None) -> AddressInfo:
        """Look up the addresses of `host`. Waits at most `timeout` seconds, and not beyond the call's deadline.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
            TimeoutError: the resolver did not answer in time.
            OSError: there is no such host, or `hang_up` was called.
        """
        found = look_up(host, port)
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while not found.done():
            left = min(self._call.remaining(), self._wait_limit_s, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"{host} was not looked up in time")
            wait([found], timeout=min(left, _LAST_READ_S))
            if self._hung_up:
                raise ConnectionAbortedError("the call was aborted")
        return found.result()

    @contextmanager
    def waiting_on(self, sock: socket.socket, timeout: float | None) -> Iterator[None]:
        """Within the block, `hang_up` shuts `sock` down, and the call's deadline limits each wait on `sock`.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
            OSError: `hang_up` was called before the block.
        """
        left = min(self._call.remaining(), self._wait_limit_s)
        sock.settimeout(left if timeout is None else min(timeout, left))
        with self._lock:
            if self._hung_up:
                raise ConnectionAbortedError("the call was aborted")
            self._socket = sock
        try:
            yield
        finally:
            with self._lock:
                self._socket = None


_bound_socket: ContextVar[CallSocket] = ContextVar("bound_socket")


@contextmanager
def bind_call(call: ModelCall) -> Iterator[CallSocket]:
    """Within the block, the deadline of `call` limits this thread's HTTP requests. `CallSocket.hang_up` ends them."""
    call_socket = CallSocket(call)
    token = _bound_socket.set(call_socket)
    try:
        yield call_socket
    finally:
        _bound_socket.reset(token)


class Connections:
    """The connections to one server. If the environment names a proxy, they use the proxy.

    The pool does not limit their number, because each connection belongs to a waiting thread. Requests go to the origin
    of `base_url` only, because conversations are sent to the configured origin only. Requests ask for uncompressed
    bodies, and a compressed one is refused, because a megabyte might expand to a gigabyte.
    """

    def __init__(self, base_url: str) -> None:
        self._base = httpx2.URL(base_url)
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            proxy=_environment_proxy(base_url),
            max_connections=None,
            keepalive_expiry=_KEEPALIVE_S,
            network_backend=_Backend(),
        )
        self.close = weakref.finalize(self, self._pool.close)
        """Close all connections. Garbage collection also closes them."""

    @contextmanager
    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Iterator[Response]:
        """Send a request, and yield its response. Call it within `bind_call` only.

        Raises:
            ProviderError: the server redirects to another origin.
            InvalidResponse: a successful response is compressed.
            TRANSPORT_ERRORS: the connection failed.
        """
        left = _bound_socket.get().remaining()
        timeouts = {"connect": min(left, CONNECT_TIMEOUT_S), "read": left, "write": left, "pool": left}
        url = self._base.copy_with(path=self._base.path.rstrip("/") + path)
        for _ in range(_MAX_REDIRECTS):
            raw = self._pool.handle_request(
                httpcore2.Request(
                    "POST",
                    httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                    headers=[
                        ("Host", url.netloc),
                        ("Content-Length", str(len(body))),
                        ("Accept-Encoding", "identity"),
                        *headers.items(),
                    ],
                    content=body,
                    extensions={"timeout": timeouts},
                )
            )
            response = Response(raw)
            try:
                url = self._target(url, response)
                if response.status not in _REPEATED:
                    yield response
                    return
            finally:
                response.close()
        raise ProviderError("The model's server redirects endlessly.", transient=False)

    def _target(self, url: httpx2.URL, response: Response) -> httpx2.URL:
        """The URL to which `response` redirects, or `url`."""
        location = response.headers.get("location")
        if not location or not HTTPStatus.MULTIPLE_CHOICES <= response.status < HTTPStatus.BAD_REQUEST:
            return url
        target = url.join(location)
        if _origin(target) != _origin(self._base):
            raise ProviderError(FOREIGN_REDIRECT, transient=False)
        return target


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


class Response:
    """A server's response. `headers` has the names in lower case."""

    def __init__(self, response: httpcore2.Response) -> None:
        self.status = response.status
        self.headers = {name.decode("ascii").lower(): value.decode("latin-1") for name, value in response.headers}
        self._response = response
        self._chunks = response.iter_stream()

    @property
    def is_success(self) -> bool:
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    def chunks(self) -> Iterator[bytes]:
        """The pieces of the body, as they arrive. A compressed body of an unsuccessful response counts as empty.

        Raises:
            InvalidResponse: the body is too long, or a successful response is compressed.
            TRANSPORT_ERRORS: the connection failed.
        """
        if self.headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
            if self.is_success:
                raise InvalidResponse(COMPRESSED)
            return
        size = 0
        for chunk in self._chunks:
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise InvalidResponse("The model's server sent a response that is too long.")
            yield chunk

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def close(self) -> None:
        """Return the connection to the pool.

        A reply ends just before the end of its body. The pool reuses a connection only after the whole body was read.
        `close` therefore reads the rest, for a tenth of a second at most.
        """
        _bound_socket.get().stop_waiting()
        try:
            next(self._chunks, None)
        except (*TRANSPORT_ERRORS, PerdureError):
            pass  # the body did not end in time: `close` closes the connection
        finally:
            self._response.close()
            _bound_socket.get().wait_again()


@contextmanager
def _waiting(
    sock: socket.socket, timeout: float | None, late: type[Exception], failed: type[Exception]
) -> Iterator[None]:
    """`CallSocket.waiting_on` that raises the errors of httpcore2, `late` for a timeout."""
    try:
        with _bound_socket.get().waiting_on(sock, timeout):
            yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise failed(str(error)) from error


class _Backend(httpcore2.NetworkBackend):
    """Connects over TCP. While a call's thread connects, another thread can abort the call."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002 (never set by this pool)
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002 (never set by this pool)
    ) -> httpcore2.NetworkStream:
        failure: Exception = httpcore2.ConnectError(f"no address for {host}")
        try:
            addresses = _bound_socket.get().addresses_of(host, port, timeout)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        for family, kind, protocol, _, address in addresses:
            try:
                return _Stream(_connect(socket.socket(family, kind, protocol), address, timeout))
            except (httpcore2.ConnectTimeout, httpcore2.ConnectError) as error:
                failure = error
        raise failure


def _connect(sock: socket.socket, address: Any, timeout: float | None) -> socket.socket:
    try:
        with _waiting(sock, timeout, httpcore2.ConnectTimeout, httpcore2.ConnectError):
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


class _Stream(httpcore2.NetworkStream):
    """A connected socket, plain or TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _waiting(self._socket, timeout, httpcore2.ReadTimeout, httpcore2.ReadError):
            return self._socket.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if buffer:
            with _waiting(self._socket, timeout, httpcore2.WriteTimeout, httpcore2.WriteError):
                self._socket.sendall(buffer)

    def close(self) -> None:
        self._socket.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        if isinstance(self._socket, ssl.SSLSocket):
            self.close()
            raise httpcore2.ConnectError("a proxy that is itself reached over TLS is not supported; use an http:// one")
        wrapped = self._socket
        try:
            with _waiting(self._socket, timeout, httpcore2.ConnectTimeout, httpcore2.ConnectError):
                wrapped = ssl_context.wrap_socket(
                    self._socket, server_hostname=server_hostname, do_handshake_on_connect=False
                )
            # The handshake follows within `_waiting` for the wrapped socket, so that it can be aborted.
            with _waiting(wrapped, timeout, httpcore2.ConnectTimeout, httpcore2.ConnectError):
                wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return _Stream(wrapped)

    def get_extra_info(self, info: str) -> Any:
        if info == "ssl_object":
            return self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        return _is_readable(self._socket) if info == "is_readable" else None


def _is_readable(sock: socket.socket) -> bool:
    """Whether an idle connection is readable. If so, the server closed the connection."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _shut_down(sock: socket.socket) -> None:
    # SSLSocket.shutdown would remove the TLS session that the reading thread uses.
    with contextlib.suppress(OSError):  # already closed, or not connected yet
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _environment_proxy(base_url: str) -> httpcore2.Proxy | None:
    """The proxy that the environment (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`) names for `base_url`."""
    url = httpx2.URL(base_url)
    if urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named:
        return None
    proxy = httpx2.Proxy(named if "://" in named else f"http://{named}")
    return httpcore2.Proxy(url=str(proxy.url), auth=proxy.raw_auth, headers=proxy.headers.raw)
