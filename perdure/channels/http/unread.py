"""ASGI middleware: a response that its client does not read is cut off, and then releases what it holds.

A server accepts a piece of a response as soon as the client has read most of the pieces before it. So the middleware
sends long bodies in pieces, and gives each piece `UNREAD_S` seconds. The server itself must close a connection whose
last piece is not read; `perdure.cli.serve.connection_limits` does.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

UNREAD_S = 30.0
"""Seconds that a client has to read a piece of a response, or a frame of a WebSocket."""

_PIECE_BYTES = 2**16
_HELD = "perdure.held"
"""The key in `scope` of the stack that `held_by` returns."""


class Unread(Exception):
    """The client has not read a piece of the response, or a frame, in time."""


def held_by(request: Request) -> ExitStack:
    """The stack that the middleware unwinds when the request's response is sent, cut off or abandoned."""
    held: ExitStack = request.scope[_HELD]
    return held


class CutsOffUnread:
    """Sends bodies in pieces, and ends responses that are not read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. An unread response of HTTP ends here; the server then closes the connection."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return

        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"") if message["type"] == "http.response.body" else b""
            ends = range(_PIECE_BYTES, len(body), _PIECE_BYTES)
            for end in ends:
                piece = body[end - _PIECE_BYTES : end]
                await _in_time(send, {"type": "http.response.body", "body": piece, "more_body": True})
            await _in_time(send, {**message, "body": body[ends[-1] :]} if ends else message)

        with ExitStack() as held:
            scope[_HELD] = held
            try:
                await self._app(scope, receive, send_in_pieces)
            except Unread:
                log.warning("a client has read nothing of its response for %g s: the response is cut off", UNREAD_S)


async def _in_time(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(UNREAD_S) as limit:
            await send(message)
    except TimeoutError:
        if not limit.expired():
            raise
        raise Unread from None
