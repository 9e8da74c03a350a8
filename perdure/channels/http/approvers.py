"""Who decides about waiting tool calls, over the routes and the WebSocket, and which waiting calls a caller sees.

A service or admin key decides about every call that it has access to. A user decides about the calls of the user's own
turns, unless staff approves them. `may_approve` of the application that mounts the gateway may allow a user further
calls, but never calls of another tenant.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

from perdure.access.tenants import tenant_of, user_of
from perdure.channels.http.auth import Caller
from perdure.channels.http.dependencies import require_turn
from perdure.channels.http.gateway import Gateway
from perdure.errors import NotFound
from perdure.tools import around
from perdure.turns.calls import approvals
from perdure.turns.calls.approvals import Decider, Decision
from perdure.turns.calls.waiting import WaitingCall, find_waiting, list_waiting

_PAGE = 100
_MOST_EXAMINED = 500
"""The most waiting calls of which one request asks `may_approve`."""


async def decide(gateway: Gateway, caller: Caller, turn_id: UUID, decision: Decision) -> tuple[UUID, bool]:
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
    gateway: Gateway, caller: Caller, *, user: str | None, after: UUID | None, limit: int
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
    """Whether `may_approve` allows the user `caller` a call, if the call runs with `arguments` (`None`: its own)."""
    if gateway.may_approve is None or caller.user is None or tenant_of(call.user) != caller.tenant:
        return False
    approval = call.body if arguments is None else {**call.body, "arguments": arguments}
    return bool(await around.call(gateway.may_approve, user_of(caller.user), approval))
