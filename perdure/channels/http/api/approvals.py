"""`/v1/approvals`: lists the tool calls that wait for a person's decision."""

from __future__ import annotations

from functools import partial
from typing import Annotated
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Query, Response

from perdure.access.tenants import user_key, user_of
from perdure.channels.http import parameters
from perdure.channels.http.approvers import waiting_for_user
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheUsers
from perdure.channels.http.schemas.answer import WITH_KEY, problems
from perdure.channels.http.schemas.turns import WaitingApproval
from perdure.turns.calls.waiting import list_waiting

router = APIRouter(prefix="/approvals", tags=["turns"], route_class=StrictRoute, responses=problems(*WITH_KEY))

_DEFAULT_LIMIT = 100

Named = Annotated[parameters.User | None, Query(description="Only calls of this user.")]
After = Annotated[UUID | None, Query(description="The position in the list, from the header `Link` of a response.")]
Limit = Annotated[int, Query(ge=1, le=1_000, description="At most this many calls.")]


@router.get("", response_description="The waiting calls, longest wait first.", responses=problems(400, 404))
async def list_(
    gateway: TheGateway,
    caller: TheCaller,
    users: TheUsers,
    response: Response,
    *,
    user_id: Named = None,
    after: After = None,
    limit: Limit = _DEFAULT_LIMIT,
) -> list[WaitingApproval]:
    """List the tool calls that wait for a person's decision.

    A key lists the calls of all users that it may access. A user token lists the calls of its user. In an application
    that passes `may_approve`, a user also lists the calls of other users that the user may approve. If there may be
    more calls, the header `Link` has the address of the next page, with `rel="next"`.
    """
    if caller.user is not None and gateway.may_approve is not None:
        user = None if user_id is None else user_key(caller.tenant, user_id)
        found, position = await waiting_for_user(gateway, caller, user=user, after=after, limit=limit)
    else:
        named = user_of(caller.user) if user_id is None and caller.user is not None else user_id
        user = None if named is None else users.key(named)
        whose = partial(list_waiting, gateway.runtime.database, user=user, tenant=users.tenant)
        found = await gateway.in_thread(partial(whose, all_tenants=users.all_users, after=after, limit=limit))
        position = found[-1].effect_id if len(found) == limit else None
    if position is not None:
        query = urlencode({"after": position, "limit": limit, **({} if user_id is None else {"user_id": user_id})})
        response.headers["Link"] = f'<?{query}>; rel="next"'
    return [WaitingApproval.model_validate(call.body) for call in found]
