"""The HTTP clients of the vendors' SDKs, as perdure wants them.

Event hooks give all SDKs what the own wires have: a conversation goes to one origin only, a reply is neither compressed
nor longer than `MAX_BODY_BYTES`, a request waits no longer than its call has left, and the log has the provider's
request id. The client has no custom transport, so it reads the proxies of the environment.

An error that a hook raises passes through the SDK, which may wrap it. `HttpExchange.failure` therefore keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import httpx2

from perdure.errors import InvalidResponse, PerdureError, ProviderError
from perdure.models.adapted.repairs import Repairs, ReplyRepair
from perdure.models.protocol import ModelCall
from perdure.models.providers import transport
from perdure.models.providers.errors import Exchange, ProviderFailure, Refusal, error_of
from perdure.models.providers.reply import rest_s
from perdure.models.providers.transport import COMPRESSED, CONNECT_TIMEOUT_S, FOREIGN_REDIRECT

log = logging.getLogger(__name__)

_KEEPALIVE_S = 30.0
_LAST_READ_S = 0.1
_REQUEST_IDS = ("x-request-id", "request-id", "mistral-correlation-id", "x-amzn-requestid")


@dataclass(slots=True)
class HttpExchange:
    """The HTTP side of one call: what the hooks need, and what they saw."""

    call: ModelCall
    exchange: Exchange
    repairs: Repairs
    is_whole: bool = False
    """Whether the reply is asked for without a stream."""
    repair: ReplyRepair | None = None
    origin: tuple[str, str, int | None] | None = None
    sent: bytes = b""
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    failure: PerdureError | None = None
    reported: ProviderFailure | None = None
    """The error that the server reported in the body of a successful response."""
    has_pieces: Callable[[], bool] = lambda: False
    """Returns whether a part of the reply was read."""
    pieces_at_end: Callable[[], int | None] = lambda: None
    """Returns how many pieces of the reply were read, or `None` if it has not ended yet."""

    def fail(self, error: PerdureError) -> PerdureError:
        """Keep `error` as the cause of the call's failure, and return it."""
        self.failure = error
        return error

    @property
    def is_empty(self) -> bool:
        """Whether the server answered with a stream of nothing."""
        return self.repair is not None and self.repair.is_empty and not self.is_whole


current: ContextVar[HttpExchange] = ContextVar("current_exchange")
"""The exchange of the task's call."""


def client(library: ModuleType = httpx2) -> Any:
    """A client of `library`: httpx2, or httpx for the SDKs that still use it.

    The number of connections is unlimited, because each belongs to a waiting call.
    """
    body = type("Body", (_Body, library.AsyncByteStream), {})
    return library.AsyncClient(
        timeout=None,  # each request sets it
        limits=library.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S),
        follow_redirects=True,
        event_hooks={"request": [_before], "response": [partial(_after, body)]},
    )


async def _before(request: Any) -> None:
    """Prepare a request of httpx2 or httpx.

    Raises:
        ProviderError: the server redirected the request to another origin.
        CallAborted, DeadlineExceeded: the call is over.
    """
    exchange = current.get()
    origin = request.url.scheme, request.url.host, request.url.port
    if exchange.origin is None:
        exchange.origin = origin
    if origin != exchange.origin:
        raise exchange.fail(ProviderError(FOREIGN_REDIRECT, transient=False))
    left = exchange.call.remaining()
    timeouts = {"connect": min(left, CONNECT_TIMEOUT_S), "read": left, "write": left, "pool": left}
    request.extensions = {**request.extensions, "timeout": timeouts}
    request.headers["accept-encoding"] = "identity"
    exchange.sent = await request.aread()
    repaired = exchange.repairs.of_request(request.url.path, exchange.sent, is_whole=exchange.is_whole)
    if repaired is not None:
        request.stream = type(request.stream)(repaired)
        request.headers["content-length"] = str(len(repaired))


async def _after(body: Any, response: Any) -> None:
    """Note what the log needs of a response of httpx2 or httpx, and check and repair its body.

    Raises:
        InvalidResponse: the response is compressed, and no error.
    """
    exchange, headers = current.get(), response.headers
    is_compressed = _note(exchange, response.status_code, headers)
    if is_compressed:  # an error, whose status says enough
        for name in ("content-encoding", "content-length", "transfer-encoding"):
            headers.pop(name, None)
    elif response.is_success:
        exchange.repair = exchange.repairs.of_reply(response.request.url.path, exchange.sent)
        if exchange.repair is not None:
            headers["content-type"] = "text/event-stream"
            headers.pop("content-length", None)
    response.stream = body(response.stream, exchange, is_dropped=is_compressed)


def watch(client: Any) -> None:
    """Note the responses of Bedrock's client, which has hooks of its own."""
    client.meta.events.register("before-parse", _before_parse)


def _before_parse(response_dict: dict[str, Any], **_: Any) -> None:
    """As `_after`, with a response of botocore."""
    body = response_dict["body"]
    try:
        is_compressed = _note(current.get(), response_dict["status_code"], response_dict["headers"])
    except InvalidResponse:
        if not isinstance(body, bytes):
            body.close()  # a stream, which nobody reads now
        raise
    if is_compressed:
        response_dict["body"] = b""


def _note(exchange: HttpExchange, status: int, headers: Any) -> bool:
    """Note a response's status and headers. Returns whether its body is compressed, which only an error's may be."""
    exchange.status = status
    exchange.headers = {name.lower(): value for name, value in headers.items()}
    exchange.exchange.request_id = next(filter(None, map(exchange.headers.get, _REQUEST_IDS)), None)
    is_compressed = exchange.headers.get("content-encoding", "").strip().lower() not in {"", "identity"}
    if is_compressed and httpx2.codes.is_success(status):
        raise exchange.fail(InvalidResponse(COMPRESSED))
    return is_compressed


class _Body:
    """The body of a response, with its repair. Nothing of it is read if `is_dropped` is true."""

    def __init__(self, stream: Any, exchange: HttpExchange, *, is_dropped: bool) -> None:
        self._stream = stream
        self._chunks: AsyncIterator[bytes] = aiter(stream)
        self._exchange = exchange
        self._is_dropped = is_dropped

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        if self._is_dropped:
            return
        async for chunk in self._until_end():
            size += len(chunk)
            self._exchange.exchange.note(chunk)
            # The SDKs buffer data until a blank line arrives, without a limit.
            if size > transport.MAX_BODY_BYTES:
                raise self._exchange.fail(InvalidResponse("The model's server sent a response that is too long."))
            repaired = self._repaired(chunk)
            if repaired:
                yield repaired
        if rest := self._repaired(None):
            yield rest

    async def _until_end(self) -> AsyncIterator[bytes]:
        """The chunks. Once the reply has ended, the stream must end within `rest_s` seconds, or counts as ended.

        A server may name the end too early. Each further piece of the reply therefore begins a new wait.
        """
        pieces, ends_at = None, None
        while True:
            # The SDK and pydantic-ai have read what came so far: they ask for more.
            if (found := self._exchange.pieces_at_end()) != pieces:
                pieces, ends_at = found, asyncio.get_running_loop().time() + rest_s(self._exchange.call)
            try:
                async with asyncio.timeout_at(ends_at):
                    chunk = await anext(self._chunks, None)
            except TimeoutError:
                log.warning("%s ended its reply, but not its stream", self._exchange.exchange.name)
                return
            if chunk is None:
                return
            yield chunk

    def _repaired(self, chunk: bytes | None) -> bytes:
        """The repaired chunk; the rest if `chunk` is `None`."""
        repair = self._exchange.repair
        if repair is None:
            return chunk or b""
        try:
            return repair.finish() if chunk is None else repair.feed(chunk)
        except Refusal as refusal:
            self._exchange.reported = refusal.failure
            raise self._exchange.fail(error_of(refusal.failure, self._exchange.repairs.clock)) from None
        except PerdureError as error:
            raise self._exchange.fail(error) from error

    async def aclose(self) -> None:
        """Return the connection to the pool.

        The SDKs stop reading at the end of the reply, just before the end of the body. The pool reuses a connection
        only after the whole body was read. `aclose` therefore reads the rest, for a tenth of a second at most.
        """
        try:
            self._exchange.call.check()
            async with asyncio.timeout(_LAST_READ_S):
                await anext(self._chunks, None)
        except (PerdureError, OSError, httpx2.HTTPError, RuntimeError):
            pass  # the call is over, or the body did not end in time: closing the stream closes the connection
        finally:
            with suppress(RuntimeError):
                await self._stream.aclose()
