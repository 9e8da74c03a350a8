"""The transport to an MCP server at a URL: the SDK's transport over an HTTP client with limits.

The SDK reads JSON answers of any length, and fails all calls of a server if one connection breaks. Therefore the HTTP
client's own transport rejects an answer that is too long, and turns a broken connection into an error response to one
request. The SDK also takes a status that is no answer for a refusal of the call; the transport decides what such a
status says about the call: that it was not sent, was refused, or may have taken effect.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR, JSONRPCError
from pydantic import ValidationError

from perdure.errors import SettingsError, loggable
from perdure.network.unlogged import unlogged_soon
from perdure.text.declarations import is_text_by_text
from perdure.text.untrusted import first_line
from perdure.tools.mcp.faults import LOST, MAX_MESSAGE_BYTES, NOT_SENT, UNANSWERED
from perdure.tools.mcp.filtering import Streams
from perdure.tools.mcp.server import UNSENDABLE, McpServer, unsendable

_SILENCE_S = 300.0
"""Seconds without data after which a connection counts as broken; most calls have a shorter time-out."""
_GOODBYE_S = 1.0
_SESSION = "mcp-session-id"
_INVALID = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
"""Statuses that may mean that the server has dropped the session; others refuse this request only."""
_JSON, _EVENTS = "application/json", "text/event-stream"
_OF_THE_CLIENT = frozenset({"user-agent", "connection", "host"})
"""What the HTTP client adds to each request. The other headers of a request are those of MCP."""


@asynccontextmanager
async def http(server: McpServer, url: str, ended: anyio.Event) -> AsyncIterator[Streams]:
    """Connect to `server` at `url`; sets `ended` if the server is unavailable or has dropped the session."""
    silence_s = max(_SILENCE_S, server.timeout_s or 0)
    gate = _SafeTransport(httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None)), server, ended)
    async with (
        httpx2.AsyncClient(
            transport=gate,
            timeout=httpx2.Timeout(server.connect_timeout_s, read=silence_s),
            event_hooks={"request": [unlogged_soon]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class _SafeTransport(httpx2.AsyncBaseTransport):
    """Turns each failure into an error response, and limits the length of responses other than event streams.

    Sends the server's own headers with each request. None of them replaces a header of MCP, such as `Accept`.
    """

    def __init__(self, inner: httpx2.AsyncBaseTransport, server: McpServer, ended: anyio.Event) -> None:
        self._inner = inner
        self._server = server
        self._ended = ended

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":  # disconnecting must not wait for a server that hangs
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), _GOODBYE_S)
        try:
            own = await self._own_headers(request.method)
        except Exception as error:  # noqa: BLE001 (the author's function may raise anything)
            self._ended.set()
            return _error_response(NOT_SENT, f"the function of its headers failed: {loggable(error)}")
        for name, value in own.items():
            if name.lower() in _OF_THE_CLIENT or name not in request.headers:
                request.headers[name] = value
        request.headers["accept-encoding"] = "identity"  # so that the limit on received bytes also limits memory
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            self._ended.set()
            return _error_response(NOT_SENT, f"{type(error).__name__}: {error}")
        except httpx2.TransportError as error:
            return _error_response(LOST, f"{type(error).__name__}: {error}")
        return await self._checked(request, response)

    async def _own_headers(self, method: str) -> Mapping[str, str]:
        given = self._server.headers
        if callable(given):
            with anyio.fail_after(_GOODBYE_S if method == "DELETE" else self._server.connect_timeout_s):
                given = await anyio.to_thread.run_sync(given, abandon_on_cancel=True)
            if not is_text_by_text(given):
                raise SettingsError(
                    f"it returned a value of type {type(given).__name__}, not a mapping of text to text"
                )
            if (name := unsendable(given)) is not None:
                raise SettingsError(f"it returned the header {name[:100]!r} {UNSENDABLE}")
        return given

    async def _checked(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        kind = response.headers.get("content-type", "").lower()
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            return _error_response(PARSE_ERROR, "compressed, although identity was requested")
        if isinstance(response.stream, httpx2.AsyncByteStream):  # the SDK bounds each event
            response.stream = _BoundedStream(response.stream, None if kind.startswith(_EVENTS) else MAX_MESSAGE_BYTES)
        dropped = response.status_code == HTTPStatus.NOT_FOUND and _SESSION in request.headers
        if dropped:
            self._ended.set()  # the server dropped the session: connect again
        if request.method != "POST":
            return response
        if dropped:  # a server does not process a request of a session that it does not know
            await response.aclose()
            return _error_response(NOT_SENT, "the server dropped the session")
        if response.is_error:
            return await _refusal(response, kind)
        return await _answer(request, response, kind)

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


async def _refusal(response: httpx2.Response, kind: str) -> httpx2.Response:
    """The server's JSON-RPC error with its status, or an error that names the status if the server sent none."""
    status = response.status_code
    given = await _json_rpc_error(response) if kind.startswith(_JSON) else None
    await response.aclose()
    code = INVALID_REQUEST if status in _INVALID else INTERNAL_ERROR
    if given is None:
        text = f"HTTP status {status} {httpx2.codes.get_reason_phrase(status)}".strip()
        return _error_response(code if response.is_client_error else LOST, text)
    if response.is_client_error and given.error.code in UNANSWERED:  # these codes are the SDK's own for a lost answer
        given.error.code = code
    return httpx2.Response(status, json=given.model_dump(by_alias=True, mode="json", exclude_unset=True))


async def _json_rpc_error(response: httpx2.Response) -> JSONRPCError | None:
    try:
        return JSONRPCError.model_validate_json(await response.aread(), by_name=False)
    except (httpx2.StreamError, ValidationError):
        return None


async def _answer(request: httpx2.Request, response: httpx2.Response, kind: str) -> httpx2.Response:
    """The response, or an error if a request gets no answer, or one that is neither JSON nor an event stream."""
    accepted = response.status_code == HTTPStatus.ACCEPTED
    if response.is_redirect or (not accepted and kind.startswith((_JSON, _EVENTS))):
        return response
    if "id" not in json.loads(request.content):  # a notification, which gets no answer
        return response
    await response.aclose()
    if accepted or not kind:
        return _error_response(LOST, f"HTTP status {response.status_code} without an answer")
    return _error_response(PARSE_ERROR, f"the type of the answer is {kind}")


def _error_response(code: int, message: str) -> httpx2.Response:
    """A JSON-RPC error response. The SDK fails only the request that the response answers."""
    error = {"code": code, "message": first_line(message)}
    return httpx2.Response(HTTPStatus.BAD_GATEWAY, json={"jsonrpc": "2.0", "id": None, "error": error})
