"""ASGI middleware: security headers for every response, and path parameters that may contain escaped slashes.

Responses are data: a browser must not guess their type, frame them, execute them or store them.

The server unescapes a path before splitting it, so it cannot tell `/v1/users/a%2Fb/export` from `/v1/users/a/b/export`.
This module unescapes the path except for `%2F` and `%25`. A route calls `unescaped` for a path parameter that may
contain one of these two.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def unescaped(segment: str) -> str:
    """A segment of the path, fully unescaped."""
    return segment.replace("%2F", "/").replace("%25", "%") if "%" in segment else segment


def _with_slashes_escaped(segment: str) -> str:
    return segment.replace("%", quote("%")).replace("/", quote("/", safe=""))
