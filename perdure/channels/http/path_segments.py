"""Paths whose parameters are whole segments: an escaped slash belongs to its segment.

The server unescapes a path before its segments are known, so that `/v1/users/a%2Fb/export` and
`/v1/users/a/b/export` look alike. Here the path is unescaped but for `%2F` and `%25`; a route reads a segment that
may hold either through `unescaped`.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Receive, Scope, Send


class WholeSegments:
    """ASGI middleware that keeps escaped slashes escaped in the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its path unescaped segment by segment."""
        raw = scope.get("raw_path", b"")
        if scope["type"] == "http" and b"%" in raw:
            segments = raw.decode("ascii", "replace").split("/")
            scope = {**scope, "path": "/".join(_kept(unquote(segment)) for segment in segments)}
        await self._app(scope, receive, send)


def unescaped(segment: str) -> str:
    """A segment of the path as its caller meant it."""
    return segment.replace("%2F", "/").replace("%25", "%") if "%" in segment else segment


def _kept(segment: str) -> str:
    return segment.replace("%", quote("%")).replace("/", quote("/", safe=""))
