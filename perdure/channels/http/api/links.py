"""`/v1/links`: links identities on channels, such as a Telegram account, to a user."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request

from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.auth import KeyKind
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheUsers
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.links import LinkCode, LinkedIdentity, NewLink
from perdure.errors import Forbidden
from perdure.users.identities import list_links, mint_code, remove_link

router = APIRouter(prefix="/links", tags=["links"], route_class=StrictRoute, responses=problems(*WITH_KEY, 400))


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_description="The code.",
    responses=problems(*WITH_BODY),
    dependencies=[audited("links.mint")],
)
async def mint(wanted: NewLink, request: Request, gateway: TheGateway, caller: TheCaller, users: TheUsers) -> LinkCode:
    """Mint a one-time code for a user. The person who sends `/link CODE` on a channel is then linked to that user.

    A new code replaces the user's previous code.
    """
    if caller.kind is KeyKind.USER:
        raise Forbidden("A user token cannot link a channel, because a link outlives the token: use a service key.")
    user = users.key(wanted.user_id)
    describe(request, user=user)
    minted = await gateway.in_thread(partial(mint_code, gateway.runtime.database, user))
    return LinkCode(code=minted.code, expires_at=minted.expires_at.isoformat())


@router.get("", response_description="The user's links.")
async def list_(gateway: TheGateway, users: TheUsers, user_id: parameters.Owner = None) -> list[LinkedIdentity]:
    """List the identities that are linked to a user. With a user token, `user_id` is the token's user by default."""
    found = await gateway.in_thread(partial(list_links, gateway.runtime.database, users.queried(user_id)))
    return [LinkedIdentity(**{**asdict(each), "created_at": each.created_at.isoformat()}) for each in found]


@router.delete(
    "",
    status_code=HTTPStatus.NO_CONTENT,
    response_description="The identity is no longer linked.",
    dependencies=[audited("links.remove")],
)
async def remove(
    *,
    user_id: parameters.Owner = None,
    channel: Annotated[parameters.User, Query(description="The link's channel.")],
    external_id: Annotated[parameters.User, Query(description="The id on that channel.")],
    request: Request,
    gateway: TheGateway,
    users: TheUsers,
) -> None:
    """Remove a user's link, if it exists. Messages from before the removal stay with the user."""
    user = users.queried(user_id)
    describe(request, user=user, note=channel)
    await gateway.in_thread(partial(remove_link, gateway.runtime.database, user, channel, external_id))
