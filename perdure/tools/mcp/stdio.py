"""An MCP server that is a child process: one JSON message a line on its stdin and stdout.

In place of the SDK's own transport, which reads a line however long it is. Here a line has a
bound, a server that writes faster than it is read waits (its pipe fills), and what it writes
on stderr is read for the log's sake and forgotten. The server has a process group of its own;
leaving ends the whole group, within `END_S`.
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
"""Seconds that ending a server takes at most: by itself, by SIGTERM, by SIGKILL, a third each."""

_POLL_S = 0.02
_CHUNK = 65_536
_SHOWN = 500
_EDGE = 200  # bytes in which an answer's id stands, at the beginning of a line or at its end
# Quotes inside a string are escaped, so what looks like this at a line's edge belongs to the message itself.
_ID = compiled(
    r'^\{\s*(?:"jsonrpc":\s*"2\.0",\s*)?"id":\s*(\d+)\s*,'
    r'|,\s*"id":\s*(\d+)\s*(?:,\s*"jsonrpc":\s*"2\.0"\s*)?\}\s*$'
)


@asynccontextmanager
async def stdio(
    server: McpServer, process_groups: set[int]
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Item], MemoryObjectSendStream[SessionMessage]]]:
    """Start `server` and end it; its process group is in `process_groups` meanwhile.

    Raises:
        OSError: it cannot be started.
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
        except BaseException:  # asyncio's own cancellation, which knows no shield
            kill(process.pid)
            raise
        finally:
            process_groups.discard(process.pid)


@dataclass(slots=True)
class _StderrTail:
    """The last of what a server wrote to stderr. Once a tool was called it may quote arguments: it is not logged."""

    data: bytearray = field(default_factory=bytearray)
    may_quote: bool = False

    def shown(self) -> str:
        if self.may_quote:
            return "(not shown, for it may quote the arguments of tools)"
        return first_line(" ".join(self.data[-_SHOWN:].decode(errors="replace").split())) or "nothing"


def kill(group: int) -> None:
    """End a process group at once, if there is still one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def _read(name: str, process: Process, incoming: MemoryObjectSendStream[Item]) -> None:
    """Hand on what the server writes, one message at a time."""
    stdout = process.stdout
    assert stdout is not None  # noqa: S101 (it was asked for)
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError), incoming:
        while item := await _next(name, stdout):
            await incoming.send(item)


async def _next(name: str, stdout: asyncio.StreamReader) -> SessionMessage | None:
    """The next message, over whatever is none; nothing at the end."""
    while True:
        try:
            line = await stdout.readuntil()
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            return _too_long(name, await _skip(stdout))
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            log.debug("the MCP server %s wrote a line of %d bytes that is no message", name, len(line))


async def _skip(stdout: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read a line to its end without keeping it; its first and its last bytes."""
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


def _too_long(name: str, edges: tuple[bytes, bytes]) -> SessionMessage | None:
    """What the call is told whose answer was too long to read; nothing if it cannot be told which."""
    log.warning("the MCP server %s sent a message of more than %d bytes, which was not read", name, MAX_MESSAGE_BYTES)
    found = next((match for edge in edges if (match := _ID.search(edge.decode("latin-1")))), None)
    if found is None:
        return None
    error = ErrorData(code=TOO_LONG, message=f"longer than {MAX_MESSAGE_BYTES:,} bytes")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(found[1] or found[2]), error=error))


async def _write(
    process: Process, outgoing: MemoryObjectReceiveStream[SessionMessage], stderr_tail: _StderrTail
) -> None:
    stdin = process.stdin
    assert stdin is not None  # noqa: S101 (it was asked for)
    with suppress(ConnectionError), outgoing:
        async for item in outgoing:
            stderr_tail.may_quote = stderr_tail.may_quote or getattr(item.message, "method", None) == "tools/call"
            stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await stdin.drain()


async def _keep_stderr_tail(process: Process, data: bytearray) -> None:
    """Read what the server says to people, and keep the last of it."""
    stderr = process.stderr
    assert stderr is not None  # noqa: S101 (it was asked for)
    while chunk := await stderr.read(_CHUNK):
        data += chunk
        del data[:-_CHUNK]


async def _discard(process: Process) -> None:
    """Read on, lest the server never be done with writing, nor its pipe with us."""
    stdout = process.stdout
    assert stdout is not None  # noqa: S101 (it was asked for)
    while await stdout.read(_CHUNK):
        pass


async def _end(name: str, process: Process, stderr_tail: _StderrTail) -> None:
    """End the server and all that it started."""
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
        kill(process.pid)  # also for what a server left behind that ended by itself
        # Both pipes reach their ends now, unless somebody holds them who left the group.
        reading.cancel_scope.deadline = anyio.current_time() + END_S / 3
    if reading.cancel_scope.cancel_called:
        log.warning("the MCP server %s left a process behind that holds its pipes", name)
    if by_itself or (process.returncode or 0) > 0:
        log.warning(
            "the MCP server %s ended with status %s; it said: %s", name, process.returncode, stderr_tail.shown()
        )


async def _exits(process: Process) -> bool:
    """Whether the process itself is gone within a third of `END_S`.

    Not by `wait`, which also waits for whoever inherited its pipes.
    """
    with anyio.move_on_after(END_S / 3):
        while process.returncode is None:  # noqa: ASYNC110 (nothing tells of it)
            await anyio.sleep(_POLL_S)
    return process.returncode is not None
