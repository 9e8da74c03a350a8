"""What reaches the SDK of all that a server sends.

The SDK starts a task for whatever a server sends unasked, and there is no end to what a
server may send. Here only answers go through, and news that the tools changed. A server's
questions are answered on the spot, one after the other: one that floods us with them, or does
not read the answers, holds up nobody but itself.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

import anyio
from mcp.client._transport import ReadStream, TransportStreams, WriteStream
from mcp.shared.message import SessionMessage
from mcp_types import (
    METHOD_NOT_FOUND,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

TOOLS_CHANGED = "notifications/tools/list_changed"

_WANTED = frozenset({TOOLS_CHANGED, "notifications/subscriptions/acknowledged", "notifications/cancelled"})
_ANSWER_S = 5
"""Seconds after which the answer to a server's question is given up."""

Item = SessionMessage | Exception
Streams = TransportStreams


class FilteredTransport:
    """A transport behind this inbox. `ended` is set when nothing more will come from the server."""

    def __init__(self, transport: AbstractAsyncContextManager[Streams], ended: anyio.Event) -> None:
        self._transport = transport
        self._ended = ended

    async def __aenter__(self) -> Streams:
        """Connect; what to read from, and what to write to."""
        read, write = await self._transport.__aenter__()
        return _FilteredStream(read, write, self._ended), write

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Disconnect."""
        self._ended.set()
        return await self._transport.__aexit__(kind, error, traceback)


class _FilteredStream:
    """The stream of what may pass."""

    def __init__(self, read: ReadStream[Item], write: WriteStream[SessionMessage], ended: anyio.Event) -> None:
        self._read = read
        self._write = write
        self._ended = ended

    async def receive(self) -> Item:
        """The next message that may pass.

        Raises:
            EndOfStream: the server is gone.
        """
        while True:
            try:
                item = await self._read.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                self._ended.set()
                raise
            if isinstance(item, Exception):  # something that was no message at all
                continue
            match item.message:
                case JSONRPCRequest():
                    await self._answer(item.message)
                case JSONRPCNotification(method=method) if method not in _WANTED:
                    continue
                case _:
                    return item

    async def _answer(self, asked: JSONRPCRequest) -> None:
        """Say that we are alive; anything else a server may ask is not offered."""
        answer: JSONRPCResponse | JSONRPCError
        if asked.method == "ping":
            answer = JSONRPCResponse(jsonrpc="2.0", id=asked.id, result={})
        else:
            error = ErrorData(code=METHOD_NOT_FOUND, message="This client does not offer that.")
            answer = JSONRPCError(jsonrpc="2.0", id=asked.id, error=error)
        with anyio.move_on_after(_ANSWER_S):
            try:
                await self._write.send(SessionMessage(answer))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._ended.set()

    async def aclose(self) -> None:
        await self._read.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
