"""The transport to an MCP server that is a child process: one JSON message per line on stdin and stdout.

The SDK's own stdio transport reads lines of any length. This transport limits the length of a line. If a server writes
faster than perdure reads, the server blocks on its pipe. The transport keeps only the end of the server's stderr, for
the log. The server runs in its own process group; disconnecting ends the whole group within `END_S` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import ErrorData, JSONRPCError, jsonrpc_message_adapter

from perdure.text.patterns import compiled
from perdure.text.untrusted import first_line
from perdure.tools.mcp.faults import MAX_MESSAGE_BYTES, TOO_LONG
from perdure.tools.mcp.filtering import Item
from perdure.tools.mcp.server import McpServer

log = logging.getLogger(__name__)

END_S = 3.0
"""The most seconds for ending a server: a third after closing stdin, a third after SIGTERM, a third after SIGKILL."""

_POLL_S = 0.02
_CHUNK = 65_536
_SHOWN = 500
_EDGE = 200  # bytes at each end of an overlong line, searched for the answer's id
# Quotes inside a string are escaped, so a match at the edge of a line is a key of the message itself.
_ID = compiled(
    r'^\{\s*(?:"jsonrpc":\s*"2\.0",\s*)?"id":\s*(\d+)\s*,'
    r'|,\s*"id":\s*(\d+)\s*(?:,\s*"jsonrpc":\s*"2\.0"\s*)?\}\s*$'
)
# A notification or a request of the server, which writes the method before the parameters, or at the end.
_METHOD = compiled(
    r'^\s*\{\s*(?:"(?:jsonrpc|id)"\s*:\s*(?:\d+|"[^"]*")\s*,\s*)*"method"\s*:'
    r'|,\s*"method"\s*:\s*"[^"\\]*"\s*(?:,\s*"(?:jsonrpc|id)"\s*:\s*(?:\d+|"[^"]*")\s*)*\}\s*$'
)


@asynccontextmanager
async def stdio(
    server: McpServer, process_groups: set[int]
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Item], MemoryObjectSendStream[SessionMessage]]]:
    """Start `server`, and end it after the `with` block.

    While the server runs, `process_groups` contains the id of its process group.

    Raises:
        OSError: the server cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *server.command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=MAX_MESSAGE_BYTES,
        env={**get_default_environment(), **server.env},
        cwd=server.cwd,
        start_new_session=True,
    )
    process_groups.add(process.pid)
    incoming, read = anyio.create_memory_object_stream[Item](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    stderr_tail = _StderrTail()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, server.name, process, incoming)
            tasks.start_soon(_write, process, outgoing, stderr_tail)
            tasks.start_soon(_keep_stderr_tail, process, stderr_tail.data)
            try:
                yield read, write
            finally:
                tasks.cancel_scope.cancel()
    finally:
        for stream in (incoming, read, write, outgoing):
            stream.close()
        try:
            with anyio.CancelScope(shield=True):
                await _end(server.name, process, stderr_tail)
        except BaseException:  # asyncio's own cancellation ignores the shield
            kill(process.pid)
            raise
        finally:
            process_groups.discard(process.pid)


@dataclass(slots=True)
class _StderrTail:
    """The end of a server's stderr.

    If a tool has been called, `loggable` does not return this text, because stderr may quote the arguments of the call.
    """

    data: bytearray = field(default_factory=bytearray)
    may_quote: bool = False

    def loggable(self) -> str:
        if self.may_quote:
            return "(not shown: it may quote the arguments of tools)"
        return first_line(" ".join(self.data[-_SHOWN:].decode(errors="replace").split())) or "nothing"


def kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def _read(name: str, process: Process, incoming: MemoryObjectSendStream[Item]) -> None:
    """Send the server's messages to `incoming`, one at a time."""
    stdout = process.stdout
    assert stdout is not None  # noqa: S101 (started with a pipe)
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError), incoming:
        while item := await _next(name, stdout):
            await incoming.send(item)


async def _next(name: str, stdout: asyncio.StreamReader) -> SessionMessage | None:
    """The next valid message; `None` at EOF, or after an overlong answer whose call is unknown.

    Skips malformed lines and overlong notifications.
    """
    while True:
        try:
            line = await stdout.readuntil()
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            edges = await _skip(stdout)
            log.warning("the MCP server %s sent a message of over %d bytes, not read", name, MAX_MESSAGE_BYTES)
            if any(_METHOD.search(edge.decode("latin-1")) for edge in edges):
                continue
            return _too_long(edges)
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            log.debug("the MCP server %s wrote a line of %d bytes that is not a message", name, len(line))


async def _skip(stdout: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read a line to its end without storing it; returns its first and last `_EDGE` bytes."""
    head = tail = b""
    while True:
        try:
            rest = await stdout.readuntil()
        except asyncio.LimitOverrunError as error:
            rest = await stdout.readexactly(error.consumed)
        except asyncio.IncompleteReadError as error:
            rest = error.partial + b"\n"
        head = head or rest[:_EDGE]
        tail = (tail + rest[-_EDGE:])[-_EDGE:]
        if rest.endswith(b"\n"):
            return head, tail


def _too_long(edges: tuple[bytes, bytes]) -> SessionMessage | None:
    """An error response for the call whose answer was too long; `None` if the answer's id is not found."""
    found = next((match for edge in edges if (match := _ID.search(edge.decode("latin-1")))), None)
    if found is None:
        return None
    error = ErrorData(code=TOO_LONG, message=f"longer than {MAX_MESSAGE_BYTES:,} bytes")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(found[1] or found[2]), error=error))


async def _write(
    process: Process, outgoing: MemoryObjectReceiveStream[SessionMessage], stderr_tail: _StderrTail
) -> None:
    stdin = process.stdin
    assert stdin is not None  # noqa: S101 (started with a pipe)
    with suppress(ConnectionError), outgoing:
        async for item in outgoing:
            stderr_tail.may_quote = stderr_tail.may_quote or getattr(item.message, "method", None) == "tools/call"
            stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await stdin.drain()


async def _keep_stderr_tail(process: Process, data: bytearray) -> None:
    """Read the server's stderr, and keep its last `_CHUNK` bytes in `data`."""
    stderr = process.stderr
    assert stderr is not None  # noqa: S101 (started with a pipe)
    while chunk := await stderr.read(_CHUNK):
        data += chunk
        del data[:-_CHUNK]


async def _discard(process: Process) -> None:
    """Read and discard stdout, so that a server which still writes does not block on its pipe."""
    stdout = process.stdout
    assert stdout is not None  # noqa: S101 (started with a pipe)
    while await stdout.read(_CHUNK):
        pass


async def _end(name: str, process: Process, stderr_tail: _StderrTail) -> None:
    """End the server and all processes of its process group."""
    by_itself = process.returncode is not None
    if process.stdin is not None:
        process.stdin.close()
    async with anyio.create_task_group() as reading:
        reading.start_soon(_discard, process)
        reading.start_soon(_keep_stderr_tail, process, stderr_tail.data)
        if not await _exits(process):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
            await _exits(process)
        kill(process.pid)  # a server that has ended may have left child processes
        # stdout and stderr reach EOF now, unless a process that left the group holds them.
        reading.cancel_scope.deadline = anyio.current_time() + END_S / 3
    if reading.cancel_scope.cancel_called:
        log.warning("the MCP server %s left a process behind that holds its pipes", name)
    if by_itself or (process.returncode or 0) > 0:
        log.warning(
            "the MCP server %s ended with status %s; end of its stderr: %s",
            name,
            process.returncode,
            stderr_tail.loggable(),
        )


async def _exits(process: Process) -> bool:
    """Wait a third of `END_S` for the process; returns whether it has ended.

    `Process.wait` is not used: it also waits for processes that inherited the pipes.
    """
    with anyio.move_on_after(END_S / 3):
        while process.returncode is None:  # noqa: ASYNC110 (there is no event for it)
            await anyio.sleep(_POLL_S)
    return process.returncode is not None
