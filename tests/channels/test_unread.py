"""The middleware that cuts off unread responses, at a server that waits for its client without a time limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request
from starlette.types import Message, Receive, Scope, Send

from perdure.channels.http.limits.reading import LEAST_READ, Reader, Unread
from perdure.channels.http.middleware import CutsOffUnread, resources_of


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_response_of_a_mounted_gateway_is_cut_off() -> None:
    """In an application's own server, too, an unread response releases what it holds."""
    sent: list[Message] = []
    released: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        resources_of(Request(scope)).callback(released.append, "memory")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 200_000})
        raise AssertionError

    async def send(message: Message) -> None:
        if len(sent) == 3:
            await _never()
        sent.append(message)

    asyncio.run(CutsOffUnread(app, unread_s=0.05)({"type": "http"}, _never, send))
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


def test_a_sockets_writer_learns_that_a_frame_is_unread() -> None:
    """The route of a WebSocket must end itself; the error tells it that its client does not read."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(Unread):
            await send({"type": "websocket.send", "text": "hello"})

    async def send(message: Message) -> None:
        await _never()

    asyncio.run(CutsOffUnread(app, unread_s=0.05)({"type": "websocket"}, _never, send))


def test_a_client_that_reads_too_slowly_is_cut_off() -> None:
    """Each piece is read in time, and yet a client would keep its response's memory for hours."""
    pieces: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * (LEAST_READ // 8), "more_body": True})
        raise AssertionError

    async def send(message: Message) -> None:
        await asyncio.sleep(0.05)  # a quarter of the least rate
        pieces.append(len(message["body"]))

    asyncio.run(CutsOffUnread(app, unread_s=0.1)({"type": "http"}, _never, send))
    assert 1 <= len(pieces) < 10


@pytest.mark.long
def test_a_client_that_reads_at_the_least_rate_goes_on() -> None:
    """The limit is a rate, so it does not limit how long a response takes."""

    async def main() -> None:
        reader = Reader(unread_s=1.0)

        async def send(message: Message) -> None:
            await asyncio.sleep(0.1)

        for _ in range(15):
            await reader.send(send, {}, LEAST_READ // 2)

    asyncio.run(main())


@pytest.mark.long
def test_an_idle_stream_is_not_cut_off() -> None:
    """A client that reads each event a little late has its whole allowance again when the stream was idle."""

    async def main() -> None:
        reader = Reader(unread_s=0.2)

        async def send(message: Message) -> None:
            await asyncio.sleep(0.05)

        for _ in range(6):
            await reader.send(send, {}, 1)
            await asyncio.sleep(0.1)

    asyncio.run(main())
