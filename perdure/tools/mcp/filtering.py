"""Filters the messages of a server before they reach the SDK.

The SDK starts a task for each unsolicited message, without a limit. This filter passes only answers, the few
notifications that perdure uses, and at most `_MOST_PROGRESS` notifications a second of the progress of calls. The
filter itself answers a server's requests, one at a time. A server that sends many requests, or does not read the
answers, delays only its own connection. `check_list` gets each list of tools first, because the SDK refuses a whole
list for one malformed tool.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

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
_PROGRESS = "notifications/progress"
_MOST_PROGRESS = 50
_ANSWER_S = 5
"""The most seconds for sending an answer to a server's request."""

Item = SessionMessage | Exception
Streams = TransportStreams
CheckList = Callable[[dict[str, Any]], dict[str, Any]]
"""Gets the result of `tools/list` as the server sent it, and returns the result for the SDK."""


class FilteredTransport:
    """Adds the filter to a transport. Sets `ended` when the connection has ended."""

    def __init__(
        self, transport: AbstractAsyncContextManager[Streams], ended: anyio.Event, check_list: CheckList = dict
    ) -> None:
        self._transport = transport
        self._ended = ended
        self._check_list = check_list

    async def __aenter__(self) -> Streams:
        """Connect; returns the streams to read from and to write to."""
        read, write = await self._transport.__aenter__()
        return FilteredStream(read, write, self._ended, self._check_list), write

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._ended.set()
        return await self._transport.__aexit__(kind, error, traceback)


class FilteredStream:
    """The stream of messages that pass the filter."""

    def __init__(
        self,
        read: ReadStream[Item],
        write: WriteStream[SessionMessage],
        ended: anyio.Event,
        check_list: CheckList = dict,
    ) -> None:
        self._read = read
        self._write = write
        self._ended = ended
        self._check_list = check_list
        self._second = 0
        self._progress = 0
        """The number of notifications of progress that passed in the second `_second`."""

    async def receive(self) -> Item:
        """The next message that passes the filter.

        Raises:
            EndOfStream: the server closed the connection.
        """
        while True:
            try:
                item = await self._read.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                self._ended.set()
                raise
            if isinstance(item, Exception):  # not a valid message
                continue
            match item.message:
                case JSONRPCRequest():
                    await self._answer(item.message)
                case JSONRPCNotification(method=method) if not self._is_wanted(method):
                    continue
                case JSONRPCResponse(result={"tools": [*_]}):
                    item.message.result = self._check_list(item.message.result)
                    return item
                case _:
                    return item

    def _is_wanted(self, method: str) -> bool:
        if method != _PROGRESS:
            return method in _WANTED
        second = int(anyio.current_time())
        self._progress = self._progress + 1 if second == self._second else 1
        self._second = second
        return self._progress <= _MOST_PROGRESS

    async def _answer(self, request: JSONRPCRequest) -> None:
        """Answer a ping; reject any other request."""
        answer: JSONRPCResponse | JSONRPCError
        if request.method == "ping":
            answer = JSONRPCResponse(jsonrpc="2.0", id=request.id, result={})
        else:
            error = ErrorData(code=METHOD_NOT_FOUND, message="This client does not offer that.")
            answer = JSONRPCError(jsonrpc="2.0", id=request.id, error=error)
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
