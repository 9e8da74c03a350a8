"""`/v1/users`: exports or erases all data of a user. `POST /v1/tokens`: mints a user token."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.auth import KeyKind
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheUsers
from perdure.channels.http.limits.shares import CHUNKED_BYTES
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.tokens import NewToken, Token
from perdure.channels.http.schemas.users import Erased, Export
from perdure.errors import Forbidden
from perdure.text.chunks import joined
from perdure.users.export import export_text

router = APIRouter(responses=problems(*WITH_KEY, 400))
_users = APIRouter(prefix="/users", tags=["users"])
_tokens = APIRouter(tags=["tokens"], route_class=StrictRoute, responses=problems(*WITH_BODY))


@_users.get("/{user_id}/export", response_model=Export, response_description="The export.", responses=problems(404))
async def export(user_id: parameters.UserPath, request: Request, gateway: TheGateway, users: TheUsers) -> Response:
    """Export all data of a user: the rows of each table, and the recent events of the user's activity stream."""
    runtime, key = gateway.runtime, users.key(user_id)
    await gateway.reserve(request, key, CHUNKED_BYTES)
    return await gateway.json_in_chunks(joined(export_text(runtime.database, runtime.clock, runtime.redis_memory, key)))


# The record of an erasure does not name the user, or the erasure would delete it.
@_users.delete("/{user_id}", response_description="Erased.", dependencies=[audited("users.erase")])
async def erase(user_id: parameters.UserPath, gateway: TheGateway, users: TheUsers) -> Erased:
    """Erase a user's messages and everything derived from them. The answer has the number of erased rows by table.

    Erasing an unknown user, or erasing a user a second time, succeeds.
    """
    erased = await gateway.in_thread(partial(gateway.runtime.eraser.erase, users.key(user_id)))
    return Erased(user_id=user_id, **asdict(erased))


@_tokens.post(
    "/tokens",
    status_code=HTTPStatus.CREATED,
    response_description="The token.",
    dependencies=[audited("tokens.mint")],
)
async def mint(wanted: NewToken, request: Request, gateway: TheGateway, caller: TheCaller, users: TheUsers) -> Token:
    """Mint a token that gives a browser or a phone access to one user's data only.

    The token expires after `ttl_s` seconds. A new `PERDURE_SECRET_KEY` revokes all tokens.
    """
    if caller.kind is KeyKind.USER:
        raise Forbidden("A user token cannot mint tokens: use a service key.")
    user = users.key(wanted.user_id)
    describe(request, user=user)
    token, expires_at = await gateway.in_thread(partial(gateway.keys.tokens.mint, user, wanted.ttl_s))
    return Token(token=token, expires_at=expires_at.isoformat())


router.include_router(_users)
router.include_router(_tokens)
