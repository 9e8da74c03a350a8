"""Headers that every answer of the gateway carries unless its route sets them.

Answers are data, not documents: a browser neither guesses their type, nor frames them, nor runs anything in them,
nor keeps them. Pages set a policy of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def with_safe_headers(given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer, and those of this module that it does not have. Names are in lower case, as in ASGI."""
    made = list(given)
    names = {name for name, _ in made}
    return made + [header for header in _HEADERS if header[0] not in names]


class SafeHeaders:
    """ASGI middleware that adds the headers of this module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the headers to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = with_safe_headers(message.get("headers", ()))
            await send(message)

        await self._app(scope, receive, with_headers)
