"""Oversized answers of MCP servers are refused while they are read, over every transport."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, JSONRPCError, JSONRPCNotification, JSONRPCRequest

from perdure import McpServer
from perdure.tools.mcp.faults import TOO_LONG
from perdure.tools.mcp.filtering import FilteredStream
from perdure.tools.mcp.http import http
from perdure.tools.mcp.stdio import stdio
from tests.bombs import MIB, gzip_bomb, peak

CHUNK = b"x" * 65_536
FLOOD = 100 * MIB // len(CHUNK)
REQUEST = JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/call", params={"name": "big"})
BEGINNING = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "'

EVENTS, JSON = "text/event-stream", "application/json"
Body = Callable[[], Iterator[bytes]]


def _json() -> Iterator[bytes]:
    yield BEGINNING
    for _ in range(FLOOD):
        yield CHUNK


def _event() -> Iterator[bytes]:
    yield b"event: message\ndata: " + BEGINNING
    for _ in range(FLOOD):
        yield CHUNK


def _lines() -> Iterator[bytes]:
    lines = b"data: xxxxxxxxxx\n" * 4_000
    yield b"event: message\n"
    for _ in range(100 * MIB // len(lines)):
        yield lines


def _bomb() -> Iterator[bytes]:
    yield gzip_bomb(before=BEGINNING)


def _event_bomb() -> Iterator[bytes]:
    yield gzip_bomb(before=b"event: message\ndata: " + BEGINNING)


@contextmanager
def _serving(body: Body, kind: str, encoding: str | None, status: int) -> Iterator[str]:
    """Run a server that answers every request with `body`; yields the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            with suppress(OSError):  # the client disconnects
                for each in body():
                    self.wfile.write(each)

        def do_DELETE(self) -> None:
            self.send_error(405)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()
    server.server_close()
    thread.join()


async def _answer(url: str) -> Any:
    async with http(McpServer("flood", url=url), url, anyio.Event()) as (read, write):
        await write.send(SessionMessage(REQUEST))
        with anyio.fail_after(20):
            return await read.receive()


@pytest.mark.long
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize(
    ("body", "kind", "encoding"),
    [
        pytest.param(_json, JSON, None, id="JSON"),
        pytest.param(_event, EVENTS, None, id="an event"),
        pytest.param(_lines, EVENTS, None, id="an event of many lines"),
        pytest.param(_bomb, JSON, "gzip", id="compressed JSON"),
        pytest.param(_event_bomb, EVENTS, "gzip", id="a compressed event"),
    ],
)
def test_a_hundred_megabytes_over_http_are_not_read(body: Body, kind: str, encoding: str | None, status: int) -> None:
    """An oversized answer over HTTP fails the call, and the worker reads only a few megabytes of it."""
    with _serving(body, kind, encoding, status) as url, peak() as found:
        item = anyio.run(_answer, url)
    assert isinstance(item, SessionMessage)
    assert isinstance(item.message, JSONRPCError)
    if encoding:
        assert (item.message.error.code, "compressed" in item.message.error.message) == (PARSE_ERROR, True)
    assert found.mib < 30


def test_a_line_of_a_hundred_megabytes_is_not_kept() -> None:
    """An oversized line over stdio is read to its end, but not kept, so that the next line can be read."""
    program = f"""
import sys
sys.stdin.readline()
sys.stdout.buffer.write({BEGINNING!r})
for _ in range({FLOOD}):
    sys.stdout.buffer.write({CHUNK[:1]!r} * {len(CHUNK)})
sys.stdout.buffer.write(b'"}}]}}}}\\n')
sys.stdout.flush()
sys.stdin.read()
"""

    async def answer() -> Any:
        server = McpServer("flood", command=[sys.executable, "-c", program])
        async with stdio(server, set()) as (read, write):
            await write.send(SessionMessage(REQUEST))
            with anyio.fail_after(20):
                return await read.receive()

    with peak() as found:
        item = anyio.run(answer)
    assert isinstance(item.message, JSONRPCError)
    assert (item.message.id, item.message.error.code) == (1, TOO_LONG)
    assert found.mib < 30


def test_a_flood_of_progress_does_not_reach_the_sdk() -> None:
    """Of a thousand notifications of progress, few pass the filter: the SDK would start a task for each."""

    async def passed() -> int:
        send, receive = anyio.create_memory_object_stream[SessionMessage | Exception](1_000)
        params = {"progressToken": 1, "progress": 1}
        flood = JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params=params)
        for _ in range(1_000):
            send.send_nowait(SessionMessage(flood))
        send.close()
        answers, sent = anyio.create_memory_object_stream[SessionMessage]()
        with answers, sent:
            async with FilteredStream(receive, answers, anyio.Event()) as stream:
                return len([each async for each in stream])

    assert 1 <= anyio.run(passed) <= 150
