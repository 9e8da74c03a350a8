"""An MCP server at a URL, through the SDK's transport, over connections that have bounds.

The SDK reads a JSON answer however long it is, and lets one broken connection end all calls
of its server. Here, below it, an answer is cut off where it is too long, and what breaks is an
error of the one request that broke.
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
"""Seconds of silence after which a connection counts as broken; a call's own time is shorter, as a rule."""
_GOODBYE_S = 1.0
_SESSION = "mcp-session-id"


@asynccontextmanager
async def http(server: McpServer, url: str, ended: anyio.Event) -> AsyncIterator[Streams]:
    """Talk to `server` at `url`; `ended` is set once it is found to be away or to have forgotten us."""
    silence_s = max(_SILENCE_S, server.timeout_s or 0)
    gate = _SafeTransport(httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None)), ended)
    async with (
        httpx2.AsyncClient(
            transport=gate,
            headers={**server.headers, "accept-encoding": "identity"},  # a bound on what is sent bounds what is held
            timeout=httpx2.Timeout(server.connect_timeout_s, read=silence_s),
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class _SafeTransport(httpx2.AsyncBaseTransport):
    """Makes of every failure an answer, and of no answer more than fits."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, ended: anyio.Event) -> None:
        self._inner = inner
        self._ended = ended

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":  # leaving must not wait for a server that hangs
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
            return _error_response(PARSE_ERROR, "compressed, which was not asked for")
        if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR and not kind.startswith("application/json"):
            await response.aclose()
            return _error_response(LOST, f"HTTP status {response.status_code}")
        if response.status_code == HTTPStatus.NOT_FOUND and _SESSION in request.headers:
            self._ended.set()  # the session is over: another one must be begun
        if isinstance(response.stream, httpx2.AsyncByteStream):
            events = kind.startswith("text/event-stream")  # of which the SDK bounds each
            response.stream = _BoundedStream(response.stream, None if events else MAX_MESSAGE_BYTES)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    """A body whose every fault is one that the SDK takes for the fault of this answer alone."""

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
            raise httpx2.StreamError(f"broken off ({type(error).__name__})") from error

    async def aclose(self) -> None:
        await self._inner.aclose()


def _error_response(code: int, message: str) -> httpx2.Response:
    """An answer that the SDK turns into the error of one request."""
    error = {"code": code, "message": first_line(message)}
    return httpx2.Response(HTTPStatus.BAD_GATEWAY, json={"jsonrpc": "2.0", "id": None, "error": error})
