"""`POST /v1/files` stores a file; `GET /v1/files/{id}/content` reads one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from perdure.access.tenants import UserKey, tenant_of
from perdure.channels.http.body import drain, require_uncompressed
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheOpenGateway, TheUsers
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.limits.shares import CHUNKED_BYTES
from perdure.channels.http.parameters import IdPath, parse_id
from perdure.channels.http.schemas.answer import WITH_KEY, problems
from perdure.channels.http.schemas.files import StoredFile, StoredForm
from perdure.errors import InvalidRequest, TooLarge
from perdure.files.spool import Spool
from perdure.files.store import Owner
from perdure.text.untrusted import first_line
from perdure.turns.inbox.incoming import MAX_NAME_CHARS, Name, UserId

router = APIRouter(tags=["files"])

_BINARY = {"type": "string", "format": "binary", "minLength": 1}
_FORM_TYPE = "multipart/form-data"
_FORM = {"type": "object", "required": ["file"], "properties": {"file": _BINARY, "purpose": {"type": "string"}}}
_BYTES = {"requestBody": {"required": True, "content": {"*/*": {"schema": _BINARY}, _FORM_TYPE: {"schema": _FORM}}}}

_FORM_BYTES = 2**16
"""The most bytes of a form without those of its file."""

_MOST_FIELDS = 16
_PURPOSE = "user_data"


@router.post(
    "/files",
    status_code=HTTPStatus.CREATED,
    response_description="Stored: messages may have the file.",
    responses=problems(*WITH_KEY, 400, 404, 413),
    openapi_extra=_BYTES,
)
async def upload(
    request: Request,
    gateway: TheOpenGateway,
    users: TheUsers,
    user_id: Annotated[UserId | None, Query(description="The file's user; by default, the token's.")] = None,
    name: Annotated[Name | None, Query(description="The file's name, which models are shown.")] = None,
) -> StoredFile | StoredForm:
    """Store a file: the body is its bytes, and `Content-Type` its type. Or it is a form, whose part `file` is the file.

    The answer to a form also has the members of OpenAI's file object: `id` is the `file_id`.

    The content shows what a file is; the given type only distinguishes kinds of text. A file without a user may be used
    by messages of all users of the key's tenant. A file that no message has is deleted after a day.
    """
    caller = users.caller
    user = users.key(user_id) if user_id is not None else caller.user
    owner = Owner(users.tenant if user is None else tenant_of(user), user)
    files, named, form = gateway.runtime.files, request.headers.get("content-type", ""), None
    await require_uncompressed(request)
    with gateway.uploads.taken(user), files.spool() as content:
        if named.partition(";")[0].strip().lower() == _FORM_TYPE:
            form = await _receive_form(gateway, request, content)
            named, name = form.media_type, name or form.name
        else:
            await _receive(request, content)
        stored = await gateway.in_thread(partial(files.put, content, owner, named=named, name=name))
    if form is None:
        return StoredFile.model_validate(stored, from_attributes=True)
    return StoredForm(
        file_id=stored.file_id,
        media_type=stored.media_type,
        size=stored.size,
        sha256=stored.sha256,
        id=str(stored.file_id),
        bytes=stored.size,
        created_at=int(gateway.runtime.clock.now().timestamp()),
        filename=name or "",
        purpose=form.purpose,
    )


@router.get(
    "/files/{file_id}/content",
    response_class=StreamingResponse,
    response_description="The bytes of the file.",
    responses={200: {"content": {"*/*": {}}}, **problems(*WITH_KEY, 404)},
)
async def content(file_id: IdPath, request: Request, gateway: TheGateway, caller: TheCaller) -> StreamingResponse:
    """The bytes of a file, with the media type that they show."""
    wanted, files = parse_id(file_id, "file"), gateway.runtime.files

    def may_see(tenant: str, user: UserKey | None) -> bool:
        if user is None:
            return caller.user is None and (caller.is_operator or (caller.tenant or "") == tenant)
        return caller.is_operator or caller.may_see(user)

    row = await gateway.in_thread(partial(files.find, wanted, may_see))
    await gateway.reserve(request, caller.user, 2 * CHUNKED_BYTES)
    pieces = files.pieces(row)

    async def body() -> AsyncGenerator[bytes, None]:
        while (piece := await gateway.in_thread(partial(next, pieces, None))) is not None:
            yield piece

    shown = f"attachment; filename*=UTF-8''{quote(row.name or wanted.hex, safe='')}"
    headers = {"Content-Disposition": shown, "Content-Length": str(row.size)}
    return StreamingResponse(body(), media_type=row.media_type, headers=headers)


@dataclass(frozen=True, slots=True)
class _Form:
    """What a form says of its file."""

    name: str | None
    media_type: str
    purpose: str


async def _receive_form(gateway: Gateway, request: Request, content: Spool) -> _Form:
    """Read a form, and write its part `file` into `content`.

    Raises:
        InvalidRequest: the form is malformed, or has no file.
        TooLarge: the form is too long; the rest is discarded.
    """
    most = gateway.runtime.settings.files.max_bytes + _FORM_BYTES
    stream = request.stream()

    async def bounded() -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in stream:
            size += len(piece)
            if size > most:
                raise TooLarge(f"The form is longer than {most:,} bytes (PERDURE_FILES__MAX_BYTES).")
            yield piece

    form = FormData()
    try:
        async with aclosing(bounded()) as pieces:
            parser = MultiPartParser(
                request.headers, pieces, max_files=1, max_fields=_MOST_FIELDS, max_part_size=_FORM_BYTES
            )
            form = await parser.parse()
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file: is missing: the form must have a part of this name, with a filename.")
        await gateway.in_thread(partial(_copy, file, content))
        named = first_line(file.filename or "", MAX_NAME_CHARS) or None
        said = first_line(purpose, MAX_NAME_CHARS) if isinstance(purpose, str) else ""
        return _Form(named, file.content_type or "", said or _PURPOSE)
    except MultiPartException as error:
        await drain(stream)
        raise InvalidRequest(f"The form cannot be read: {error.message}") from None
    except TooLarge:
        await drain(stream)
        raise
    finally:
        await form.close()


def _copy(file: UploadFile, content: Spool) -> None:
    while piece := file.file.read(CHUNKED_BYTES):
        content.write(piece)


async def _receive(request: Request, content: Spool) -> None:
    stream = request.stream()
    async for piece in stream:
        try:
            content.write(piece)
        except TooLarge:
            await drain(stream)
            raise
