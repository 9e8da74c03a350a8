"""The middleware that cuts off unread responses, at a server that waits for its client without a time limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request
from starlette.types import Message, Receive, Scope, Send

from perdure.channels.http import middleware
from perdure.channels.http.middleware import CutsOffUnread, Unread, held_by


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_response_of_a_mounted_gateway_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an application's own server, too, an unread response releases what it holds."""
    monkeypatch.setattr(middleware, "UNREAD_S", 0.05)
    sent: list[Message] = []
    released: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        held_by(Request(scope)).callback(released.append, "memory")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 200_000})
        raise AssertionError

    async def send(message: Message) -> None:
        if len(sent) == 3:
            await _never()
        sent.append(message)

    asyncio.run(CutsOffUnread(app)({"type": "http"}, _never, send))
    assert released == ["memory"]
    assert [len(each.get("body", b"")) for each in sent] == [0, 2**16, 2**16]


def test_a_long_body_is_sent_whole_and_in_pieces() -> None:
    """The pieces are the body, and only the last one ends the response."""
    sent: list[Any] = []
    body = bytes(range(256)) * 1_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for part in (body, b"", b"end"):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"end"})

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(CutsOffUnread(app)({"type": "http"}, _never, send))
    assert b"".join(each["body"] for each in sent) == body + b"end"
    assert max(len(each["body"]) for each in sent) <= 2**16
    assert [each["more_body"] for each in sent] == [True] * (len(sent) - 1) + [False]


def test_a_sockets_writer_learns_that_a_frame_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route of a WebSocket must end itself; the error tells it that its client does not read."""
    monkeypatch.setattr(middleware, "UNREAD_S", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(Unread):
            await send({"type": "websocket.send", "text": "hello"})

    async def send(message: Message) -> None:
        await _never()

    asyncio.run(CutsOffUnread(app)({"type": "websocket"}, _never, send))
