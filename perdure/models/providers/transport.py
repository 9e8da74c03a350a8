"""HTTP connections that another thread can hang up.

Closing a response from another thread does not wake a thread that is blocked in `recv`;
shutting its socket down does. So this transport knows, for the thread of each call, the
socket that it is blocked on, from the connect to the last byte. And since each wait is
bounded by what is left of the call, a server that drips one byte a second gains nothing.

Only public interfaces of httpx2 and httpcore2 are used; the pool is theirs.
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
from perdure.network.dns import Found, look_up

CONNECT_TIMEOUT_S = 5.0
"""Seconds to reach a server; a healthy one is reached in far less."""

MAX_BODY_BYTES = 64 * 1024**2
"""Bytes of one response: the longest reply of any model, in small pieces, is half of it."""

_KEEPALIVE_S = 30.0
_PORTS = {"http": 80, "https": 443}
_LAST_READ_S = 0.1


class ForeignRedirect(httpx2.TransportError):
    """The server redirects to another origin: the conversation is sent to none but the configured one."""


class Compressed(httpx2.TransportError):
    """The server sent a compressed reply, though none was asked for: a megabyte of it can unpack to a gigabyte."""


class CallSocket:
    """One call's hold on the network: the socket that its thread is blocked on just now."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._hung_up = False
        self._wait_limit_s = float("inf")

    def stop_waiting(self) -> None:
        """Wait no longer than a moment for whatever is still to come."""
        self._wait_limit_s = _LAST_READ_S

    def hang_up(self) -> None:
        """Wake the call's thread, from another one; nothing more is sent or received."""
        with self._lock:
            self._hung_up = True
            if self._socket is not None:
                _shut_down(self._socket)

    def addresses_of(self, host: str, port: int, timeout: float | None) -> Found:
        """Look `host` up; a resolver that takes longer than the call or `timeout` (seconds) is left behind.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
            TimeoutError: the resolver did not answer in time.
            OSError: there is no such host, or the call was hung up.
        """
        found = look_up(host, port)
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while not found.done():
            left = min(self._call.remaining(), self._wait_limit_s, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"{host} was not looked up in time")
            wait([found], timeout=min(left, _LAST_READ_S))
            if self._hung_up:
                raise ConnectionAbortedError("the call was hung up")
        return found.result()

    @contextmanager
    def waiting_on(self, sock: socket.socket, timeout: float | None) -> Iterator[None]:
        """Let `hang_up` reach `sock` within the block, and bound its waits by the call's deadline.

        Raises:
            CallAborted, DeadlineExceeded: the call is over.
            OSError: the call was hung up.
        """
        left = min(self._call.remaining(), self._wait_limit_s)
        sock.settimeout(left if timeout is None else min(timeout, left))
        with self._lock:
            if self._hung_up:
                raise ConnectionAbortedError("the call was hung up")
            self._socket = sock
        try:
            yield
        finally:
            with self._lock:
                self._socket = None


_bound_socket: ContextVar[CallSocket] = ContextVar("line")


@contextmanager
def bind_call(call: ModelCall) -> Iterator[CallSocket]:
    """Make what this thread sends and receives within the block belong to `call`."""
    call_socket = CallSocket(call)
    token = _bound_socket.set(call_socket)
    try:
        yield call_socket
    finally:
        _bound_socket.reset(token)


class Transport(httpx2.BaseTransport):
    """An httpx transport over one pool of such connections, through the environment's proxy if there is one.

    Requests may only be made inside `bind_call`. Connections are not limited in number: each
    belongs to a thread that waits for it. Requests go to the origin of `base_url` only, and ask for bodies that
    are not compressed: the SDKs unpack a body without a bound.
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
        """Send `request`; the response's body is read as it comes.

        Raises:
            ForeignRedirect: the request is for another origin, to which the server redirected it.
            Compressed: the reply is compressed. The body of an error or a redirect is left out then.
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
        """Close every connection."""
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
                # The SDKs collect whatever comes until there is a blank line in it.
                if size > MAX_BODY_BYTES:
                    raise InvalidResponse("The model's server sends without end.")
                yield chunk

    def close(self) -> None:
        """Give the connection back.

        Reading stops at the reply's end, just before the body's. Only a connection whose
        body was read to the end can be used again, so a moment is spent on the rest.
        """
        _bound_socket.get().stop_waiting()
        try:
            next(self._chunks, None)
        except (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError, PerdureError):
            pass  # no end in sight: then the connection is closed, as it is when a call was ended
        finally:
            self._response.close()


class _Backend(httpcore2.NetworkBackend):
    """Connects over TCP so that a call can be hung up while it still connects."""

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
            # The handshake comes after the wrapping, so that there is a socket to hang up meanwhile.
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
    """Whether an idle connection has something to read, which means that the server closed it."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _shut_down(sock: socket.socket) -> None:
    # Not SSLSocket.shutdown: it takes the TLS session away from under the thread that is reading.
    with contextlib.suppress(OSError):  # already closed by the other side, or not yet connected
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


@contextmanager
def _mapped() -> Iterator[None]:
    """Turn httpcore2's errors into httpx2's of the same name."""
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
