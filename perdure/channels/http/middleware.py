"""ASGI middleware: security headers for every response, the end of unread responses, and escaped slashes in paths.

Responses are data: a browser must not guess their type, frame them, execute them or store them.

The server unescapes a path before splitting it, so it cannot tell `/v1/users/a%2Fb/export` from `/v1/users/a/b/export`.
This module unescapes the path except for `%2F` and `%25`. A route calls `unescaped` for a path parameter that may
contain one of these two.

A server accepts a piece of a response as soon as the client has read most of the pieces before it. So this module sends
long bodies in pieces, and `perdure.channels.http.limits.reading` limits how long they wait for the client. The server
itself must close a connection whose last piece is not read; `perdure.cli.serve.connection_limits` does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from urllib.parse import quote, unquote

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.channels.http.limits.reading import UNREAD_S, Reader, Unread
from perdure.observe.traces import Traces

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**16
_RESOURCES = "perdure.resources"
"""The key in `scope` of the stack that `resources_of` returns."""
_READER = "perdure.reader"
"""The key in `scope` of what `reader_of` returns."""

_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def with_safe_headers(given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """`given`, plus the security headers that `given` lacks. Names of headers are in lower case, as in ASGI."""
    headers = list(given)
    names = {name for name, _ in headers}
    return headers + [header for header in _HEADERS if header[0] not in names]


class SafeHeaders:
    """Adds the security headers to each response, except for headers that the route sets."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, and add the headers to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = with_safe_headers(message.get("headers", ()))
            await send(message)

        await self._app(scope, receive, send_with_headers)


class WholeSegments:
    """Keeps escaped slashes escaped in the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with the path unescaped, except for `%2F` and `%25`."""
        raw = scope.get("raw_path", b"")
        if scope["type"] == "http" and b"%" in raw:
            segments = raw.decode("ascii", "replace").split("/")
            scope = {**scope, "path": "/".join(_with_slashes_escaped(unquote(segment)) for segment in segments)}
        await self._app(scope, receive, send)


def reader_of(connection: HTTPConnection) -> Reader:
    """The client of a request or of a WebSocket, as the middleware's sends measure it."""
    reader: Reader = connection.scope[_READER]
    return reader


def resources_of(request: HTTPConnection) -> ExitStack:
    """The stack that the middleware unwinds when the request's response is sent, cut off or abandoned."""
    resources: ExitStack = request.scope[_RESOURCES]
    return resources


class CutsOffUnread:
    """Sends bodies in pieces, and ends responses that are not read, or read too slowly."""

    def __init__(self, app: ASGIApp, unread_s: float = UNREAD_S) -> None:
        self._app = app
        self._unread_s = unread_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. An unread response of HTTP ends here; the server then closes the connection."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return

        reader = Reader(self._unread_s)

        async def send_in_pieces(message: Message) -> None:
            if message["type"] == "websocket.send":
                await reader.send(send, message, len(message.get("text") or message.get("bytes") or ""))
                return
            body = message.get("body", b"") if message["type"] == "http.response.body" else b""
            ends = range(_PIECE_BYTES, len(body), _PIECE_BYTES)
            for end in ends:
                piece = body[end - _PIECE_BYTES : end]
                await reader.send(send, {"type": "http.response.body", "body": piece, "more_body": True}, len(piece))
            last = body[ends[-1] :] if ends else body
            await reader.send(send, {**message, "body": last} if ends else message, len(last))

        with ExitStack() as resources:
            scope[_RESOURCES], scope[_READER] = resources, reader
            try:
                await self._app(scope, receive, send_in_pieces)
            except Unread:
                log.warning("a client has read too little of its response: the response is cut off")


class Traced:
    """Makes the span of the client, which a header names, the current one. Added only while turns are traced."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application within the span."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        with self._traces.joined(headers):
            await self._app(scope, receive, send)


def unescaped(segment: str) -> str:
    return segment.replace("%2F", "/").replace("%25", "%") if "%" in segment else segment


def _with_slashes_escaped(segment: str) -> str:
    return segment.replace("%", quote("%")).replace("/", quote("/", safe=""))
