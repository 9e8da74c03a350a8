"""Implements `Model` for an endpoint: sends the prompt, reads the reply, and adapts to what the server refuses.

Requests and replies are plain JSON; no SDK is used. A streamed reply of an SDK costs up to six times the CPU time. No
other module of perdure retries a request that a server refused because of an option.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from typing import Any

import httpcore2

from perdure.clock import Clock
from perdure.errors import DeadlineExceeded, InvalidResponse, ProviderError
from perdure.models import output_tool
from perdure.models.endpoints import ANTHROPIC, OPENAI, Refused
from perdure.models.families import family
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.models.providers import chat_wire, messages_wire
from perdure.models.providers.endpoint import Adaptation, Endpoint, Quirks, adapted, known, remember
from perdure.models.providers.errors import (
    Exchange,
    ProviderFailure,
    Refusal,
    connection_error,
    error_of,
    failure_in,
    failure_of,
    reports_failure,
)
from perdure.models.providers.json_values import documents
from perdure.models.providers.reply import Origin, ReplyDraft, names_of, rest_s
from perdure.models.providers.transport import TRANSPORT_ERRORS, Connections, Response, bind_call

log = logging.getLogger(__name__)

_WIRES = {OPENAI: chat_wire.WIRE, ANTHROPIC: messages_wire.WIRE}
_MOST_ADAPTATIONS = 8
_REQUEST_IDS = ("x-request-id", "request-id")
_UNREADABLE = "The model's server sent something that cannot be read."
_NOT_A_REPLY = "The model's server sent something that is not part of a reply."
_DONE = b"[DONE]"
_ABOUT_STREAMS = ("to stream this model", "streaming is not supported", "not support streaming")
"""Parts of messages that refuse a stream."""
BLANK = b"\xef\xbb\xbf \t\r\n"


class Client:
    """Sends the requests of the model or embedder called `name` to its endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, name: str, clock: Clock) -> None:
        self.endpoint = endpoint
        self._name = name
        self._clock = clock
        self._connections = Connections(endpoint.base_url)
        self.close = self._connections.close

    @contextmanager
    def calling(self, call: ModelCall) -> Iterator[Exchange]:
        """Within the block, `call` can abort the requests. Maps their failures to `perdure.errors`, and logs them."""
        exchange = Exchange(self._name, self.endpoint.may_be_quoted, bool(self.endpoint.show_received))
        with bind_call(call) as call_socket, call.aborting(call_socket.hang_up):
            try:
                yield exchange
            except TRANSPORT_ERRORS as error:
                call.check()  # raises if the engine has ended the call
                raise exchange.log_failure(connection_error(error)) from error
            except Refusal as refusal:
                raise exchange.log_failure(error_of(refusal.failure, self._clock), refusal.failure) from None
            except (InvalidResponse, ProviderError) as error:
                call.check()
                exchange.log_failure(error)
                raise
            except (ValueError, RecursionError) as error:  # invalid UTF-8 or JSON, or JSON nested too deeply
                call.check()
                raise exchange.log_failure(InvalidResponse(_UNREADABLE)) from error

    @contextmanager
    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        exchange: Exchange,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[Response]:
        """Send a request within `calling`, and yield the response, whose status is that of a success.

        Raises:
            Refusal: the response has another status.
        """
        sent = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "perdure"}
        sent |= self.endpoint.authorization
        own = {name.title(): value for given in (self.endpoint.headers, headers or {}) for name, value in given.items()}
        raw = json.dumps(body, ensure_ascii=False).encode(errors="replace")
        with self._connections.post(path, raw, sent | own) as response:
            exchange.request_id = next(filter(None, map(response.headers.get, _REQUEST_IDS)), None)
            if not response.is_success:
                raise Refusal(failure_of(response.status, response.read(), response.headers))
            yield response


class EndpointModel:
    """A model of an endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, model: str, clock: Clock, refused: Refused | None = None) -> None:
        """`model` is the model's name for the server. `refused` is shared with the server's other models."""
        self.name = f"{endpoint.name}:{model}"
        self._model = model
        self._clock = clock
        self._client = Client(endpoint, self.name, clock)
        self.close = self._client.close
        self._wire = _WIRES[endpoint.kind]
        self._path = self._wire.path(endpoint.base_url)
        self.supported_settings = self._wire.settings
        """The names of `ModelRequest.settings` that the endpoint's protocol has. Others are not sent."""
        self._origin: Origin = (endpoint.identity, family(model))
        self._quirks = endpoint.quirks_of(family(model))
        self._refused: Refused = {} if refused is None else refused

    @property
    def reads(self) -> frozenset[str]:
        """The media types of files that the model reads, as far as the server has not refused them."""
        return self._quirks.reads

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt, and stream the text to `call`; see `Model.respond`."""
        with self._client.calling(call) as exchange:
            quirks = learned = before = known(self._quirks, self._refused, self._origin[0])
            for attempt in count(1):
                sent = self._with_output(request, quirks)
                body = self._wire.request_body(self._model, sent, quirks, self._origin)
                body = body if body.get("stream") else _unstreamed(body)
                try:
                    reply = self._ask(sent, body, quirks, call, exchange)
                    break
                except Refusal as refusal:
                    found = self._adaptation(quirks, refusal, body) if attempt <= _MOST_ADAPTATIONS else None
                    if found is None:
                        raise
                    log.warning("%s refused %s, and is asked again without", self.name, found.what)
                    quirks, learned = found.quirks, found.quirks if found.lasting else learned
            if learned is not before:
                self._quirks = learned
                remember(learned, self._refused, self._origin[0])
            exchange.log_success()
            return reply if sent is request else output_tool.as_text(request, reply, call)

    def _with_output(self, request: ModelRequest, quirks: Quirks) -> ModelRequest:
        """`request`, with the output as a tool if the server refuses its schema, or has other tools to offer."""
        if not request.requires_output or not (request.tools or self._wire.output in quirks.omits):
            return request
        return output_tool.with_tool(request)

    def _adaptation(self, quirks: Quirks, refusal: Refusal, body: Mapping[str, Any]) -> Adaptation | None:
        error = error_of(refusal.failure, self._clock)
        is_final = (
            refusal.late or not isinstance(error, ProviderError) or (refusal.failure.status is None and error.transient)
        )
        if is_final:
            return None
        return without_stream(quirks, refusal.failure, body) or adapted(
            quirks, refusal.failure, body, self._wire.required
        )

    def _ask(
        self, request: ModelRequest, body: Mapping[str, Any], quirks: Quirks, call: ModelCall, exchange: Exchange
    ) -> ModelReply:
        exchange.received = b""
        assembler = self._wire.assembler(names_of(request), quirks, self._origin)
        headers = {**self._wire.headers, **request.settings.get("extra_headers", {})}
        with self._client.post(self._path, body, exchange, headers) as response:
            self._read(_noted(response, exchange, may_be_empty=bool(body["stream"])), assembler, call)
        if not exchange.received and body["stream"]:  # the server may have failed behind the head of its response
            whole = _unstreamed(body)
            try:
                return self._ask(request, whole, quirks, call, exchange)
            except (httpcore2.RemoteProtocolError, httpcore2.NetworkError):
                # The server closes the kept connection at about this time. The next request has a new one.
                return self._ask(request, whole, quirks, call, exchange)
        rest, reply = assembler.finish()
        call.delta(rest)
        return reply

    def _read(self, chunks: Iterator[bytes], assembler: ReplyDraft, call: ModelCall) -> None:
        """Read a reply to the end of its stream, for which it waits only `rest_s` seconds once the reply has ended.

        A server may name the end too early. Each further piece of the reply therefore begins a new wait.
        """
        size = -1
        with ExitStack() as waiting:
            for parsed, is_whole in events(chunks):
                if parsed is None:  # it only keeps the connection open
                    continue
                if reports_failure(parsed):
                    raise Refusal(failure_in(parsed), late=bool(assembler.text_length or assembler.stop_reason))
                if not isinstance(parsed, dict):
                    raise InvalidResponse(_NOT_A_REPLY)
                call.delta(assembler.feed_whole(parsed) if is_whole else assembler.feed(parsed))
                if assembler.complete:
                    break
                if assembler.stop_reason and assembler.size > size:
                    size = assembler.size
                    waiting.close()
                    waiting.enter_context(self._waiting_for_rest(call))

    @contextmanager
    def _waiting_for_rest(self, call: ModelCall) -> Iterator[None]:
        """Read the stream within the block for `rest_s` seconds at most. Then the block ends without an error."""
        try:
            with call.part(rest_s(call)) as part, bind_call(part) as part_socket, part.aborting(part_socket.hang_up):
                yield
        except (DeadlineExceeded, httpcore2.TimeoutException):
            call.check()
            log.warning("%s ended its reply, but not its stream", self.name)


def without_stream(quirks: Quirks, failure: ProviderFailure, body: Mapping[str, Any]) -> Adaptation | None:
    """How `body` can be sent to a server that refuses to stream the reply. Returns `None` if it refuses another thing.

    OpenAI streams some models only to organizations that it has verified.
    """
    is_about_streams = failure.param == "stream" or any(each in failure.said for each in _ABOUT_STREAMS)
    if not body.get("stream") or not is_about_streams:
        return None
    return Adaptation(quirks | Quirks(omits=frozenset({"stream"})), "a stream")


def _unstreamed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in body.items() if name != "stream_options"}, "stream": False}


def _noted(response: Response, exchange: Exchange, *, may_be_empty: bool) -> Iterator[bytes]:
    """The body of `response`. Its beginning is noted for the log.

    If `may_be_empty` is true, a connection that the server closes before the first byte counts as an empty body.
    """
    try:
        for chunk in response.chunks():
            exchange.note(chunk)
            yield chunk
    except httpcore2.RemoteProtocolError:
        if exchange.received or not may_be_empty:
            raise


def events(chunks: Iterator[bytes]) -> Iterator[tuple[Any, bool]]:
    """The JSON of each server-sent event of a body, or its whole JSON, and whether it is whole.

    Some servers send whole JSON where a stream was requested, or each event as JSON in a line of its own.

    Raises:
        ValueError, RecursionError: the body has no JSON.
    """
    beginning = next((start for each in chunks if (start := each.lstrip(BLANK))), b"")
    if beginning.startswith((b"{", b"[")):
        found = documents(b"".join((beginning, *chunks)))
        yield from ((each, len(found) == 1) for each in found)
        return
    data: list[bytes] = []
    for line in _lines(chain((beginning,), chunks, (b"\n\n",))):
        if line.startswith(b"data:"):
            data.append(line[5:].lstrip(b" "))
        elif not line and data:
            joined, data = b"\n".join(data), []
            if joined.startswith(_DONE):
                return
            if joined:
                yield json.loads(joined), False


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for chunk in chunks:
        parts.append(chunk)
        if b"\n" in chunk or b"\r" in chunk:
            lines = b"".join(parts).splitlines(keepends=True)
            # The end of the last line may be in the next chunk; one that ends in "\r" may go on with "\n".
            parts = [] if lines[-1].endswith(b"\n") else [lines.pop()]
            for line in lines:
                yield line.rstrip(b"\r\n")
