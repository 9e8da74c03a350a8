"""The transport to an MCP server at a URL: the SDK's transport over an HTTP client with limits.

The SDK reads JSON answers of any length, and fails all calls of a server if one connection breaks. Therefore the HTTP
client's own transport rejects an answer that is too long, and turns a broken connection into an error response to one
request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp_types import PARSE_ERROR

from perdure.text.untrusted import first_line
from perdure.tools.mcp.faults import LOST, MAX_MESSAGE_BYTES, NOT_SENT
from perdure.tools.mcp.filtering import Streams
from perdure.tools.mcp.server import McpServer

_SILENCE_S = 300.0
"""Seconds without data after which a connection counts as broken; most calls have a shorter time-out."""
_GOODBYE_S = 1.0
_SESSION = "mcp-session-id"


@asynccontextmanager
async def http(server: McpServer, url: str, ended: anyio.Event) -> AsyncIterator[Streams]:
    """Connect to `server` at `url`; sets `ended` if the server is unavailable or has dropped the session."""
    silence_s = max(_SILENCE_S, server.timeout_s or 0)
    gate = _SafeTransport(httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None)), ended)
    async with (
        httpx2.AsyncClient(
            transport=gate,
            headers={
                **server.headers,
                "accept-encoding": "identity",
            },  # so that the limit on received bytes also limits memory
            timeout=httpx2.Timeout(server.connect_timeout_s, read=silence_s),
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class _SafeTransport(httpx2.AsyncBaseTransport):
    """Turns each failure into an error response, and limits the length of responses other than event streams."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, ended: anyio.Event) -> None:
        self._inner = inner
        self._ended = ended

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":  # disconnecting must not wait for a server that hangs
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), _GOODBYE_S)
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            self._ended.set()
            return _error_response(NOT_SENT, f"{type(error).__name__}: {error}")
        except httpx2.TransportError as error:
            return _error_response(LOST, f"{type(error).__name__}: {error}")
        return await self._checked(request, response)

    async def _checked(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        kind = response.headers.get("content-type", "").lower()
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            return _error_response(PARSE_ERROR, "compressed, although identity was requested")
        if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR and not kind.startswith("application/json"):
            await response.aclose()
            return _error_response(LOST, f"HTTP status {response.status_code}")
        if response.status_code == HTTPStatus.NOT_FOUND and _SESSION in request.headers:
            self._ended.set()  # the server dropped the session: connect again
        if isinstance(response.stream, httpx2.AsyncByteStream):
            events = kind.startswith("text/event-stream")  # the SDK bounds each event
            response.stream = _BoundedStream(response.stream, None if events else MAX_MESSAGE_BYTES)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    """A response's body of at most `limit` bytes. Raises only errors that the SDK attributes to this response."""

    def __init__(self, inner: httpx2.AsyncByteStream, limit: int | None) -> None:
        self._inner = inner
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        try:
            async for chunk in self._inner:
                read += len(chunk)
                if self._limit is not None and read > self._limit:
                    raise httpx2.StreamError(f"longer than {self._limit:,} bytes")
                yield chunk
        except httpx2.TransportError as error:
            raise httpx2.StreamError(f"interrupted ({type(error).__name__})") from error

    async def aclose(self) -> None:
        await self._inner.aclose()


def _error_response(code: int, message: str) -> httpx2.Response:
    """A JSON-RPC error response. The SDK fails only the request that the response answers."""
    error = {"code": code, "message": first_line(message)}
    return httpx2.Response(HTTPStatus.BAD_GATEWAY, json={"jsonrpc": "2.0", "id": None, "error": error})
