"""`POST /v1/tokens`: mints a user token."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from fastapi import APIRouter

from perdure.channels.http.auth import KeyKind
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheUsers
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.tokens import NewToken, Token
from perdure.errors import Forbidden

router = APIRouter(tags=["tokens"], route_class=StrictRoute, responses=problems(*WITH_KEY, *WITH_BODY))


@router.post("/tokens", status_code=HTTPStatus.CREATED, response_description="The token.")
async def mint(wanted: NewToken, gateway: TheGateway, caller: TheCaller, users: TheUsers) -> Token:
    """Mint a token with which a browser or a phone reaches one user's things, and nothing else.

    It expires after `ttl_s` seconds. A new `PERDURE_SECRET_KEY` revokes all tokens.
    """
    if caller.kind is KeyKind.USER:
        raise Forbidden("A user token mints no tokens: use a service key.")
    user = users.key(wanted.user_id)
    token, expires_at = await gateway.in_thread(partial(gateway.keys.tokens.mint, user, wanted.ttl_s))
    return Token(token=token, expires_at=expires_at.isoformat())
