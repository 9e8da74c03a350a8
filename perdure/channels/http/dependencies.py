"""FastAPI dependencies of the routes: the gateway, the caller, and the caller's access.

A route with a `user_id` depends on `TheUsers`, which converts the id to the user's key. A route with the id of a turn
or session in its path depends on `TheTurn` or `TheSession`. They respond with 404 if the caller has no access to the
turn or session.

A service or admin key decides about every waiting tool call that it has access to. A user decides about the calls of
the user's own turns, unless staff approves them. `may_approve` of the application that mounts the gateway may allow a
user further calls, but never calls of another tenant.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Query, Request

from perdure.access.tenants import PATTERN, UserKey, parse_tenant, tenant_of, user_key, user_of
from perdure.channels.http.auth import Caller, KeyKind
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.middleware import resources_of
from perdure.channels.http.parameters import IdPath, parse_id
from perdure.channels.http.schemas.turns import Incoming as NewMessage
from perdure.errors import Forbidden, InvalidRequest, NotFound
from perdure.sessions import reading as sessions
from perdure.tools import around
from perdure.turns import reading as turns
from perdure.turns.calls import approvals
from perdure.turns.calls.approvals import Decider, Decision
from perdure.turns.calls.waiting import WaitingCall, find_waiting, list_waiting
from perdure.turns.inbox import route_unrouted
from perdure.turns.inbox.incoming import DEFAULT_PRIORITY, Incoming, Submitted

log = logging.getLogger(__name__)

Tenant = Annotated[
    str | None,
    Query(
        description="The user's tenant. An admin key without a tenant may name any; other keys have one fixed tenant.",
        json_schema_extra={"pattern": PATTERN},
    ),
]


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


TheGateway = Annotated[Gateway, Depends(gateway_of)]

_PAGE = 100
_MOST_EXAMINED = 500
"""The most waiting calls of which one request asks `may_approve`."""

CALLER = "perdure.caller"
"""The key in `request.scope` of the caller, once `caller_of` or the console has authenticated it."""


async def caller_of(request: Request) -> Caller:
    """The caller of a request. The key is checked once per request, and the request counts against its user's share.

    Raises:
        Unauthorized, RateLimited, Forbidden: as `Gateway.caller`.
        RateLimited: the user has too many open requests.
    """
    caller: Caller | None = request.scope.get(CALLER)
    if caller is None:
        gateway: Gateway = request.app.state.gateway
        caller = request.scope[CALLER] = await gateway.caller(request)
        resources_of(request).enter_context(gateway.requests.taken(caller.user))
    return caller


TheCaller = Annotated[Caller, Depends(caller_of)]
"""The caller. If keys are configured, the request needs a valid key or token."""


async def _administrator(caller: TheCaller) -> Caller:
    if not caller.is_operator:
        wanted = "an admin key without a tenant" if caller.kind is KeyKind.ADMIN else "an admin key"
        raise Forbidden(f"This concerns the whole installation and requires {wanted}.")
    return caller


TheAdministrator = Annotated[Caller, Depends(_administrator)]
"""The caller of a route that affects all tenants. The request needs an admin key without a tenant."""


async def _open_gateway(request: Request) -> Gateway:
    await caller_of(request)  # first, so that an unauthenticated caller gets 401, not 503
    gateway = await gateway_of(request)
    gateway.admit()
    return gateway


TheOpenGateway = Annotated[Gateway, Depends(_open_gateway)]
"""The gateway, for a route that accepts work. Responds with 503 while `Gateway.admit` refuses new messages."""


@dataclass(frozen=True, slots=True)
class Users:
    """The users that a request may name: the users of `tenant`, or only the user of the caller's token.

    If `tenant` is `None`, the request may name users without a tenant. `all_users` is true if the caller is an operator
    and the request names no tenant; a list may then cover all users.
    """

    caller: Caller
    tenant: str | None
    all_users: bool = False

    def key(self, user_id: str | None) -> UserKey:
        """The key of the user with the id `user_id`; `None` means the user of the caller's token.

        Raises:
            InvalidRequest: no user can have that id, or it is `None` and the caller has no user.
            NotFound: the caller's token is for another user.
        """
        if user_id is None:
            if self.caller.user is None:
                raise InvalidRequest("user_id: is missing.")
            return self.caller.user
        key = user_key(self.tenant, user_id)
        if self.caller.kind is KeyKind.USER and not self.caller.may_see(key):
            raise NotFound("There is no such user.")
        return key

    def queried(self, user_id: str | None) -> UserKey:
        """As `key`, of the parameter `user_id` in a query.

        Raises:
            InvalidRequest, NotFound: as `key`.
            Forbidden: `user_id` is `None`, and the caller has no user.
        """
        if user_id is None and self.caller.user is None:
            raise Forbidden("Name a user_id: only a user token implies one.")
        return self.key(user_id)

    def address(self, message: Submitted | NewMessage) -> Incoming:
        """`message`, with the user's key in place of `user_id`.

        Raises:
            InvalidRequest: no user can have that id.
            NotFound: the caller's token is for another user.
            Forbidden: the message has a member that a user token may not set.
        """
        if self.caller.kind is KeyKind.USER:
            if message.reply_to is not None:
                raise Forbidden("reply_to: requires a service key, not a user token.")
            if message.priority > DEFAULT_PRIORITY:
                raise Forbidden(f"priority: above {DEFAULT_PRIORITY} requires a service key, not a user token.")
        return message.of(self.key(message.user_id))


async def _users(caller: TheCaller, tenant: Tenant = None) -> Users:
    named = parse_tenant(tenant)
    if named is None:
        return Users(caller, caller.tenant, all_users=caller.is_operator)
    if named != caller.tenant and not caller.is_operator:
        raise Forbidden("tenant: naming another tenant than the key's requires an admin key without a tenant.")
    return Users(caller, named)


TheUsers = Annotated[Users, Depends(_users)]
"""The users that the caller may name in the request."""


def require_session(gateway: Gateway, caller: Caller, session_id: UUID) -> None:
    """Check that the caller has access to a session. Blocks.

    Raises:
        NotFound: the caller has no access to the session. An operator has access to any id, so the route itself must
            check that the session exists.
    """
    if not caller.is_operator and not caller.may_see(sessions.owner(gateway.runtime.database, session_id)):
        raise NotFound("There is no such session.")


def require_turn(gateway: Gateway, caller: Caller, turn_id: UUID) -> UUID:
    """Check that the caller has access to a turn; returns the turn's id. Blocks.

    If the turn's message was merged into another turn, or repeats another turn's message, returns the id of that other
    turn.

    Raises:
        NotFound: the caller has no access to the turn. An operator has access to any id, so the route itself must
            check that the turn exists.
    """
    found = turns.find_owner(gateway.runtime.database, turn_id)
    if not caller.is_operator and (found is None or not caller.may_see(found[0])):
        raise NotFound("There is no such turn.")
    is_routed = found is None or found[1]
    return turn_id if is_routed else route_unrouted.resolve(gateway.runtime, turn_id)


async def _turn(turn_id: IdPath, gateway: TheGateway, caller: TheCaller) -> UUID:
    return await gateway.in_thread(partial(require_turn, gateway, caller, parse_id(turn_id, "turn")))


async def _session(session_id: IdPath, gateway: TheGateway, caller: TheCaller) -> UUID:
    parsed = parse_id(session_id, "session")
    if not caller.is_operator:
        await gateway.in_thread(partial(require_session, gateway, caller, parsed))
    return parsed


TheTurn = Annotated[UUID, Depends(_turn)]
"""The id of the turn in the path, as `require_turn` returns it. A caller without access to the turn gets 404."""

TheSession = Annotated[UUID, Depends(_session)]
"""The id of the session in the path. A caller without access to the session gets 404."""


async def decide_as(gateway: Gateway, caller: Caller, turn_id: UUID, decision: Decision) -> tuple[UUID, bool]:
    """Record the caller's decision. Returns the turn's id, and whether the caller has access to the turn.

    Raises:
        NotFound: the caller has no access to the turn and may not approve the call, or there is no such call.
        Forbidden: staff approves the call, and the caller is not staff.
        Conflict, InvalidRequest, Unavailable: as `approvals.decide`.
    """
    database, is_own = gateway.runtime.database, True
    try:
        turn_id = await gateway.in_thread(partial(require_turn, gateway, caller, turn_id))
    except NotFound:
        if gateway.may_approve is None:
            raise
        is_own = False
    if caller.user is None:
        by = Decider(f"{caller.kind} key", is_staff=True)
    else:
        call = await gateway.in_thread(partial(find_waiting, database, turn_id, decision.call_id))
        allowed = call is not None and await _may_approve(gateway, caller, call, decision.arguments)
        if not (is_own or allowed):
            raise NotFound("There is no such turn.")
        by = Decider.user(caller.user, is_staff=allowed)
    await gateway.in_thread(partial(approvals.decide, gateway.runtime, turn_id, decision, by))
    return turn_id, is_own


async def waiting_for_user(
    gateway: Gateway, caller: Caller, *, user: UserKey | None, after: UUID | None, limit: int
) -> tuple[list[WaitingCall], UUID | None]:
    """The waiting calls that a user sees: the user's own, and those that `may_approve` allows.

    `user` selects the calls of one user, by key. Returns at most `limit` calls, and the effect id after which the next
    page begins, or `None`.
    """
    found: list[WaitingCall] = []
    for _ in range(_MOST_EXAMINED // _PAGE):
        read = partial(list_waiting, gateway.runtime.database, user=user, tenant=caller.tenant, limit=_PAGE)
        page = await gateway.in_thread(partial(read, after=after))
        for call in page:
            if call.user == caller.user or await _may_approve(gateway, caller, call):
                found.append(call)
            after = call.effect_id
            if len(found) == limit:
                return found, after
        if len(page) < _PAGE:
            return found, None
    return found, after


async def _may_approve(
    gateway: Gateway, caller: Caller, call: WaitingCall, arguments: dict[str, Any] | None = None
) -> bool:
    """Whether `may_approve` allows the user `caller` a call, if the call runs with `arguments` (`None`: its own).

    False if `may_approve` fails: an error must not tell a caller that the call exists.
    """
    if gateway.may_approve is None or caller.user is None or tenant_of(call.user) != caller.tenant:
        return False
    approval = call.body if arguments is None else {**call.body, "arguments": arguments}
    try:
        return bool(await around.call(gateway.may_approve, user_of(caller.user), approval))
    except Exception:
        log.exception("may_approve failed, so it allows nothing")
        return False
