"""`POST /v1/files` stores a file; `GET /v1/files/{id}/content` reads one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from perdure.access.tenants import UserKey, tenant_of
from perdure.channels.http.body import drain
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheOpenGateway, TheUsers
from perdure.channels.http.limits.shares import CHUNKED_BYTES
from perdure.channels.http.parameters import IdPath, parse_id
from perdure.channels.http.schemas.answer import WITH_KEY, problems
from perdure.channels.http.schemas.files import StoredFile
from perdure.errors import TooLarge
from perdure.files.spool import Spool
from perdure.files.store import Owner
from perdure.turns.inbox.incoming import Name, UserId

router = APIRouter(tags=["files"])

_BINARY = {"type": "string", "format": "binary", "minLength": 1}
_BYTES = {"requestBody": {"required": True, "content": {"*/*": {"schema": _BINARY}}}}


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
) -> StoredFile:
    """Store a file: the body is its bytes, and `Content-Type` its type.

    The content shows what a file is; the given type only distinguishes kinds of text. A file without a user may be used
    by messages of all users of the key's tenant. A file that no message has is deleted after a day.
    """
    caller = users.caller
    user = users.key(user_id) if user_id is not None else caller.user
    owner = Owner(users.tenant if user is None else tenant_of(user), user)
    files, named = gateway.runtime.files, request.headers.get("content-type")
    with gateway.uploads.taken(user), files.spool() as content:
        await _receive(request, content)
        stored = await gateway.in_thread(partial(files.put, content, owner, named=named, name=name))
    return StoredFile.model_validate(stored, from_attributes=True)


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


async def _receive(request: Request, content: Spool) -> None:
    stream = request.stream()
    async for piece in stream:
        try:
            content.write(piece)
        except TooLarge:
            await drain(stream)
            raise
