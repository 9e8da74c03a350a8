"""Request bodies: bounded, strict JSON, read after the caller is authenticated.

A route of a router with `StrictRoute` declares its body as a pydantic model. Without `StrictRoute`, FastAPI reads a
body of any length before it authenticates the caller. It also accepts NaN and duplicate keys, and refuses JSON with
another media type, such as that of `curl -d`. FastAPI validates the model after it has run the dependencies, so a
caller without access gets 401, 403 or 404 for any body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers

from perdure.channels.http.dependencies import caller_of, gateway_of
from perdure.channels.http.errors import invalid_request
from perdure.errors import InvalidRequest, TooLarge
from perdure.text.untrusted import load_object

MAX_BODY_BYTES = 2**20
"""The longest body of most routes. Those of a `FileRoute` may have files in Base64."""
MAX_DRAINED_BYTES = 2**26

_DRAIN_S = 5.0
_COPIES = 4
"""The copies of a long body that parsing it makes: its bytes, their text, its strings, and a file."""
_INLINE_BYTES = 2**14
"""The longest body that is parsed in the event loop. A longer one may cause 100,000 validation errors, so it is parsed
and validated in a thread."""

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route that reads its body, if the route declares one, as a strict JSON object."""

    takes_files = False
    any_text = False

    def get_route_handler(self) -> _Handler:
        """FastAPI's handler, wrapped so that it receives the strictly parsed body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        declared = self.body_field.field_info
        annotation: Any = declared.annotation
        required = declared.is_required()
        parse = partial(_parse, model=TypeAdapter(annotation), required=required, any_text=self.any_text)

        async def handle_strictly(request: Request) -> Response:
            await caller_of(request)
            read = partial(_read_with_files, request) if self.takes_files else partial(read_body, request)
            return await handle(_ParsedRequest(request, await parse(request, read)))

        return handle_strictly


class FileRoute(StrictRoute):
    """A route whose body may have files in Base64, each of at most `PERDURE_FILES__MAX_BYTES`."""

    takes_files = True


class HistoryRoute(FileRoute):
    """A route whose body may have a history that is not stored. The route itself refuses text that cannot be stored."""

    any_text = True


class _ParsedRequest(Request):
    """A request with an already parsed body, for FastAPI's handler."""

    def __init__(self, request: Request, content: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._content = content

    @property
    def headers(self) -> Headers:
        """The headers without `Content-Type`, so that FastAPI treats the body as JSON."""
        return Headers(raw=[header for header in self.scope["headers"] if header[0] != b"content-type"])

    async def body(self) -> bytes:
        """A placeholder: FastAPI only checks whether there is a body."""
        return b"{}"

    async def json(self) -> Any:
        """The parsed object, or the validated model of a long body.

        If the body is unusable, returns an error message. A message is no object, so every model rejects it.
        """
        return self._content


async def _parse(
    request: Request,
    read: Callable[[], Awaitable[bytes]],
    *,
    model: TypeAdapter[Any],
    required: bool,
    any_text: bool,
) -> Any:
    """The return value of `_ParsedRequest.json`. `read` reads the body.

    Stores an error in `request.state.unusable_body`, where the error handler finds it.
    """
    try:
        body = await read()
        if not required and not body.strip():
            return {}
        if len(body) <= _INLINE_BYTES:
            return parse_object(body, any_text=any_text)
        gateway = await gateway_of(request)
        return await gateway.in_thread(partial(_parse_and_check, body, model, any_text=any_text))
    except (InvalidRequest, TooLarge) as error:
        request.state.unusable_body = error
        return error.message


def _parse_and_check(body: bytes, model: TypeAdapter[Any], *, any_text: bool) -> Any:
    try:
        return model.validate_python(parse_object(body, any_text=any_text))
    except ValidationError as error:
        errors = ({**each, "loc": ("body", *each["loc"])} for each in error.errors(include_input=False))
        raise invalid_request(errors) from None


async def _read_with_files(request: Request) -> bytes:
    """The body of a `FileRoute`. Beyond `MAX_BODY_BYTES`, reserves the memory in which it is parsed.

    A body of unknown length reserves nothing before it exceeds `MAX_BODY_BYTES`, and then as much as the longest one.

    Raises:
        TooLarge: it is longer than a file may be, in Base64, and its other members.
        RateLimited: too many long bodies are being read.
    """
    gateway = await gateway_of(request)
    most = MAX_BODY_BYTES + gateway.runtime.settings.files.max_bytes * 4 // 3
    user = (await caller_of(request)).user

    async def reserve(size: int) -> None:
        await gateway.reserve_body(request, user, _COPIES * size)

    named = request.headers.get("content-length", "")
    if not named.isdecimal():
        return await read_body(request, most, partial(reserve, most))
    if (size := min(int(named), most)) > MAX_BODY_BYTES:
        await reserve(size)
    return await read_body(request, most)


async def read_body(
    request: Request, most: int = MAX_BODY_BYTES, on_long: Callable[[], Awaitable[None]] | None = None
) -> bytes:
    """The request's body, of at most `most` bytes. `on_long` is called once if it exceeds `MAX_BODY_BYTES`.

    Raises:
        InvalidRequest: the body is compressed.
        TooLarge: the body is longer; the rest is discarded.
    """
    await require_uncompressed(request)
    body = bytearray()
    stream = request.stream()
    async for chunk in stream:
        body += chunk
        if on_long is not None and len(body) > MAX_BODY_BYTES:
            await on_long()
            on_long = None
        if len(body) > most:
            await drain(stream)
            raise TooLarge(f"The body is longer than {most} bytes.")
    return bytes(body)


async def require_uncompressed(request: Request) -> None:
    """Raise InvalidRequest if the body is compressed: its length, when unpacked, would have no limit."""
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in {"", "identity"}:
        await drain(request.stream())
        raise InvalidRequest(f"content-encoding: {coding[:40]!r} is not supported; send the body uncompressed.")


async def drain(stream: AsyncIterator[bytes]) -> None:
    """Read the rest of a body and discard it, up to `MAX_DRAINED_BYTES` bytes and `_DRAIN_S` seconds.

    Most clients read the response only after they have sent the whole body. Closing a connection with unread bytes
    resets it, and the client loses the response.
    """
    read = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for chunk in stream:
                read += len(chunk)
                if read > MAX_DRAINED_BYTES:
                    return


def parse_object(body: bytes, *, any_text: bool = False) -> dict[str, Any]:
    """The JSON object that `body` holds.

    Raises:
        InvalidRequest: `body` is not UTF-8, not JSON, not an object, or holds text that PostgreSQL cannot store, unless
            `any_text`.
    """
    try:
        text = body.decode("utf-8-sig")  # some shells write a byte order mark
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8 (at byte {error.start}).") from None
    if not text.strip():
        raise InvalidRequest("The body is empty; it must be a JSON object.")
    try:
        return load_object(text, any_text=any_text)
    except ValueError as error:
        raise InvalidRequest(f"The body cannot be used: {error}.") from None
