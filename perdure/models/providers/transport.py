"""An HTTP transport whose connections another thread can abort.

A thread that is blocked in `recv` wakes if another thread shuts the socket down, but not if another thread closes the
response. A `CallSocket` therefore tracks the socket on which a call's thread is blocked, from the connect to the last
byte. The call's remaining time limits each wait, so a server that sends one byte a second cannot prolong the call.

The transport uses the connection pool of httpcore2, and only public interfaces of httpx2 and httpcore2.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpcore2
import httpx2

from perdure.errors import InvalidResponse, PerdureError
from perdure.models.protocol import ModelCall
from perdure.network.dns import AddressInfo, look_up

CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds to connect to a server."""

MAX_BODY_BYTES = 64 * 1024**2
"""Maximum bytes of one response. The longest reply of any model, sent in small events, has half as many bytes."""

_KEEPALIVE_S = 30.0
_PORTS = {"http": 80, "https": 443}
_LAST_READ_S = 0.1


class ForeignRedirect(httpx2.TransportError):
    """The server redirects to another origin. Conversations are sent to the configured origin only."""


class Compressed(httpx2.TransportError):
    """The server sent a compressed reply despite `Accept-Encoding: identity`. The reply might expand to gigabytes."""


class CallSocket:
    """Tracks the socket on which a call's thread is blocked, so that another thread can shut the socket down."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._hung_up = False
        self._wait_limit_s = float("inf")

    def stop_waiting(self) -> None:
        self._wait_limit_s = _LAST_READ_S

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


class Transport(httpx2.BaseTransport):
    """An httpx2 transport with one connection pool. If the environment names a proxy, connections use the proxy.

    Call it only within `bind_call`. The pool does not limit the number of connections, because each connection belongs
    to a waiting thread. Requests go to the origin of `base_url` only. They ask for uncompressed bodies, because the
    SDKs decompress a body without limiting its size.
    """

    def __init__(self, base_url: str) -> None:
        self._origin = _origin(httpx2.URL(base_url))
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            proxy=_environment_proxy(base_url),
            max_connections=None,
            keepalive_expiry=_KEEPALIVE_S,
            network_backend=_Backend(),
        )

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send `request` and return the response, whose body is a stream.

        Raises:
            ForeignRedirect: the server redirected the request to another origin.
            Compressed: a successful response is compressed. (A compressed error response gets an empty body instead.)
        """
        raw = request.url
        if _origin(raw) != self._origin:
            raise ForeignRedirect(f"redirected to {raw.scheme}://{raw.host}")
        with _mapped():
            response = self._pool.handle_request(
                httpcore2.Request(
                    method=request.method,
                    url=httpcore2.URL(scheme=raw.raw_scheme, host=raw.raw_host, port=raw.port, target=raw.raw_path),
                    headers=[*_without(request.headers.raw, b"accept-encoding"), (b"Accept-Encoding", b"identity")],
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        if not _is_compressed(response):
            return httpx2.Response(
                status_code=response.status,
                headers=response.headers,
                stream=_Body(response),
                extensions=response.extensions,
            )
        response.close()
        if httpx2.codes.is_success(response.status):
            raise Compressed("the reply is compressed")
        headers = _without(response.headers, b"content-encoding", b"content-length", b"transfer-encoding")
        return httpx2.Response(response.status, headers=headers, content=b"", extensions=response.extensions)

    def close(self) -> None:
        self._pool.close()


def _is_compressed(response: httpcore2.Response) -> bool:
    encodings = (value for name, value in response.headers if name.lower() == b"content-encoding")
    return any(value.strip().lower() not in {b"", b"identity"} for value in encodings)


def _without(headers: Iterable[tuple[bytes, bytes]], *names: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in names]


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


class _Body(httpx2.SyncByteStream):
    def __init__(self, response: httpcore2.Response) -> None:
        self._response = response
        self._chunks = response.iter_stream()

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        with _mapped():
            for chunk in self._chunks:
                size += len(chunk)
                # The SDKs buffer data until a blank line arrives, without a limit.
                if size > MAX_BODY_BYTES:
                    raise InvalidResponse("The model's server sent a response that is too long.")
                yield chunk

    def close(self) -> None:
        """Return the connection to the pool.

        The SDKs stop reading at the end of the reply, just before the end of the body. The pool reuses a connection
        only after the whole body was read. `close` therefore reads the rest, for a tenth of a second at most.
        """
        _bound_socket.get().stop_waiting()
        try:
            next(self._chunks, None)
        except (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError, PerdureError):
            pass  # the body did not end in time: `close` closes the connection
        finally:
            self._response.close()


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
            except TimeoutError as error:
                failure = httpcore2.ConnectTimeout(str(error))
            except OSError as error:
                failure = httpcore2.ConnectError(str(error))
        raise failure


def _connect(sock: socket.socket, address: Any, timeout: float | None) -> socket.socket:
    try:
        with _bound_socket.get().waiting_on(sock, timeout):
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
        try:
            with _bound_socket.get().waiting_on(self._socket, timeout):
                return self._socket.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore2.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        try:
            with _bound_socket.get().waiting_on(self._socket, timeout):
                self._socket.sendall(buffer)
        except TimeoutError as error:
            raise httpcore2.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        if isinstance(self._socket, ssl.SSLSocket):
            self.close()
            raise httpcore2.ConnectError("a proxy that is itself reached over TLS is not supported; use an http:// one")
        try:
            # The handshake follows within `waiting_on`, so that it can be aborted.
            wrapped = ssl_context.wrap_socket(
                self._socket, server_hostname=server_hostname, do_handshake_on_connect=False
            )
        except OSError as error:
            self.close()
            raise httpcore2.ConnectError(str(error)) from error
        try:
            with _bound_socket.get().waiting_on(wrapped, timeout):
                wrapped.do_handshake()
        except TimeoutError as error:
            wrapped.close()
            raise httpcore2.ConnectTimeout(str(error)) from error
        except OSError as error:
            wrapped.close()
            raise httpcore2.ConnectError(str(error)) from error
        except BaseException:
            wrapped.close()
            raise
        return _Stream(wrapped)

    def get_extra_info(self, info: str) -> Any:
        match info:
            case "ssl_object":
                return self._socket if isinstance(self._socket, ssl.SSLSocket) else None
            case "client_addr":
                return self._socket.getsockname()
            case "server_addr":
                return self._socket.getpeername()
            case "socket":
                return self._socket
            case "is_readable":
                return _is_readable(self._socket)
            case _:
                return None


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


@contextmanager
def _mapped() -> Iterator[None]:
    """Raise each error of httpcore2 as the error of httpx2 with the same name."""
    try:
        yield
    except (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError) as error:
        mapped: type[httpx2.TransportError] = getattr(httpx2, type(error).__name__)
        raise mapped(str(error)) from error
    except httpcore2.UnsupportedProtocol as error:
        raise httpx2.UnsupportedProtocol(str(error)) from error


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
