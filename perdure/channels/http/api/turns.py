"""`/v1/turns` and `/v1/approvals`: turns, decisions about their tool calls, and feedback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from perdure.access.tenants import user_key
from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.auth import KeyKind
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import (
    TheAdministrator,
    TheCaller,
    TheGateway,
    TheTurn,
    TheUsers,
    decide_as,
    waiting_for_user,
)
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.operating import ListedTurn, Timeline
from perdure.channels.http.schemas.turns import (
    Accepted,
    CallResultBody,
    DecisionBody,
    FeedbackBody,
    Prompts,
    Turn,
    WaitingApproval,
)
from perdure.channels.http.stream import sse
from perdure.errors import Forbidden
from perdure.events.event import EventId
from perdure.runtime import Runtime
from perdure.turns.calls.outside import answer
from perdure.turns.calls.waiting import list_waiting
from perdure.turns.cancel import cancel as cancel_turn
from perdure.turns.costs import cost_of
from perdure.turns.feedback import give_feedback
from perdure.turns.inbox.again import retry as try_again
from perdure.turns.prompts import read_prompts
from perdure.turns.reading import SETTLED, list_turns, read_turn
from perdure.turns.timeline import read_timeline

LastEventId = Annotated[
    str | None,
    Header(
        description="The id of the last event that the client received.", json_schema_extra={"pattern": EventId.PATTERN}
    ),
]

_CONCEALED: dict[str, Any] = {
    "reply": None,
    "error": None,
    "usage": None,
    "pending_approvals": [],
    "pending_calls": [],
    "decisions": [],
    "waiting_for": None,
    "delayed": None,
}
"""The members of a turn that a user who decides about another user's call does not see."""

router = APIRouter(
    prefix="/turns/{turn_id}", tags=["turns"], route_class=StrictRoute, responses=problems(*WITH_KEY, 404)
)
listed = APIRouter(prefix="/turns", tags=["turns"], route_class=StrictRoute, responses=problems(*WITH_KEY))
waiting = APIRouter(prefix="/approvals", tags=["turns"], route_class=StrictRoute, responses=problems(*WITH_KEY))

_DEFAULT_LIMIT = 100

Step = Annotated[int | None, Query(ge=1, le=1_000, description="Only the model call with this number, from 1.")]

OfUser = Annotated[parameters.User | None, Query(description="Only turns of this user.")]
OfSession = Annotated[UUID | None, Query(description="Only turns of this session.")]
OfStatus = Annotated[
    Literal["done", "failed", "cancelled"] | None, Query(description="Only turns that ended in this way.")
]
TurnLimit = Annotated[int, Query(ge=1, le=1_000, description="At most this many turns.")]
Named = Annotated[parameters.User | None, Query(description="Only calls of this user.")]
After = Annotated[UUID | None, Query(description="The position in the list, from the header `Link` of a response.")]
Limit = Annotated[int, Query(ge=1, le=1_000, description="At most this many calls.")]


@router.get("", response_description="The turn.", response_model_exclude_unset=True, responses=problems(400))
async def read(turn_id: TheTurn, request: Request, gateway: TheGateway, wait: parameters.Wait = None) -> Turn:
    """Read a turn. With `wait`, the response waits until the turn is settled, for `wait` seconds at most."""
    turn = await gateway.in_thread(partial(_read, gateway, turn_id))
    if not wait or turn.status in SETTLED:
        return turn
    await gateway.until_settled(turn_id, min(wait, parameters.MAX_WAIT_S), request)
    return await gateway.in_thread(partial(_read, gateway, turn_id))


@router.get(
    "/events",
    response_class=StreamingResponse,
    response_description="Server-sent events, until the turn is settled.",
    responses={
        **problems(400),
        HTTPStatus.OK: {"content": {sse.MEDIA_TYPE: {}}},
        HTTPStatus.NO_CONTENT: {"description": "The client has all events of the turn."},
    },
)
async def events(
    turn_id: TheTurn, request: Request, gateway: TheGateway, last_event_id: LastEventId = None
) -> Response:
    """Stream a turn's events. With `Last-Event-ID`, the stream continues after that event."""
    last = EventId.parse(last_event_id) if last_event_id is not None else None
    gateway.require_room()
    found = gateway.events(request, turn_id, last, sse.HEARTBEAT_S)
    try:
        first = await gateway.unless_left(
            request, anext(found)
        )  # an error before the first event sets the response's status
    except StopAsyncIteration:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return sse.response(sse.chunks(first, found))


@router.get(
    "/prompt",
    response_description="The prompts of the turn's model calls, one for each stored reply.",
    response_model_exclude_unset=True,
    responses=problems(400, 403),
)
async def prompt(turn_id: TheTurn, gateway: TheGateway, caller: TheCaller, step: Step = None) -> Prompts:
    """Read what each model call of a turn was given, or that of one `step`. Needs a key, not a user token.

    The texts come from the rows that the prompt was made of. A part whose rows were erased, forgotten or changed since
    has a `note` that says so. docs/operating.md describes the parts.
    """
    if caller.kind is KeyKind.USER:
        raise Forbidden("A prompt requires a service key or an admin key, not a user token.")
    runtime = gateway.runtime
    found = await gateway.in_thread(
        lambda: read_prompts(runtime.database, runtime.settings, runtime.agents, turn_id, step=step)
    )
    return Prompts.model_validate(found)


@router.get("/timeline", response_description="The timeline.")
async def timeline(turn_id: parameters.IdPath, gateway: TheGateway, _admin: TheAdministrator) -> Timeline:
    """Read what happened when in a turn: steps, calls, waits, decisions, and workers that took it over."""
    parsed = parameters.parse_id(turn_id, "turn")
    return await gateway.in_thread(partial(_timeline, gateway.runtime, parsed))


@router.post(
    "/retry",
    status_code=HTTPStatus.ACCEPTED,
    response_description="The new turn.",
    responses=problems(409),
    dependencies=[audited("turns.retry", "turn_id")],
)
async def retry(turn_id: parameters.IdPath, gateway: TheGateway, _admin: TheAdministrator) -> Accepted:
    """Accept the messages of a failed or cancelled turn again. A repeated request returns the same new turn."""
    gateway.admit()
    parsed = parameters.parse_id(turn_id, "turn")
    accepted = await gateway.in_thread(partial(try_again, gateway.runtime, parsed))
    return Accepted.model_validate(accepted, from_attributes=True)


@listed.get("", response_description="The turns, the newest first.", responses=problems(400))
async def list_turns_(
    gateway: TheGateway,
    _admin: TheAdministrator,
    users: TheUsers,
    *,
    user_id: OfUser = None,
    session_id: OfSession = None,
    status: OfStatus = None,
    limit: TurnLimit = _DEFAULT_LIMIT,
) -> list[ListedTurn]:
    """List turns. `GET /v1/sessions/live` lists the sessions whose turns are not settled."""
    key = None if user_id is None else users.key(user_id)
    whose = partial(list_turns, gateway.runtime.database, user=key, tenant=users.tenant if key is None else None)
    found = await gateway.in_thread(partial(whose, session_id=session_id, status=status, limit=limit))
    return [ListedTurn.model_validate(each) for each in found]


@router.post(
    "/cancel",
    status_code=HTTPStatus.ACCEPTED,
    response_description="Requested. The body is the turn's current state.",
    response_model_exclude_unset=True,
    dependencies=[audited("turns.cancel", "turn_id")],
)
async def cancel(turn_id: TheTurn, gateway: TheGateway) -> Turn:
    """Cancel a turn: at once if it has not begun, else at its next safe point. A settled turn is unchanged."""
    return await _after(gateway, turn_id, lambda: cancel_turn(gateway.runtime, turn_id))


@router.post(
    "/approval",
    status_code=HTTPStatus.ACCEPTED,
    response_description="Decided. The body is the turn's current state.",
    response_model_exclude_unset=True,
    responses=problems(*WITH_BODY, 409),
    dependencies=[audited("turns.decide", "turn_id")],
)
async def approval(
    turn_id: parameters.IdPath, decision: DecisionBody, request: Request, gateway: TheGateway, caller: TheCaller
) -> Turn:
    """Approve or deny the call `call_id` of `pending_approvals`. If `arguments` are given, they replace the model's.

    If the call's `approver` is `staff`, a user token gets 403: a key decides, or a user whom the application's
    `may_approve` allows it. To a user of another turn than the user's own, the response shows only the turn's status.
    """
    describe(request, note=f"{decision.decision} {decision.call_id}")
    decided, is_own = await decide_as(gateway, caller, parameters.parse_id(turn_id, "turn"), decision)
    turn = await gateway.in_thread(partial(_read, gateway, decided))
    return (
        turn
        if is_own
        else Turn.model_validate(
            turn.model_dump(exclude={"metadata", "tools_left_out", "parent_turn_id", "children"}) | _CONCEALED
        )
    )


@router.post(
    "/results",
    status_code=HTTPStatus.ACCEPTED,
    response_description="Recorded. The body is the turn's current state.",
    response_model_exclude_unset=True,
    responses=problems(*WITH_BODY, 409),
    dependencies=[audited("turns.answer", "turn_id")],
)
async def results(turn_id: TheTurn, given: CallResultBody, gateway: TheGateway) -> Turn:
    """Bring the result of the call `call_id` of `pending_calls`, or the error with which it failed.

    The turn goes on when each of these calls has its result. The first result of a call counts: the same request again
    changes nothing. Whoever has access to the turn may bring a result, its user included.
    """
    return await _after(gateway, turn_id, lambda: answer(gateway.runtime, turn_id, given))


@waiting.get("", response_description="The waiting calls, longest wait first.", responses=problems(400, 404))
async def list_approvals(
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
        user = None if user_id is None and caller.user is None else users.key(user_id)
        whose = partial(list_waiting, gateway.runtime.database, user=user, tenant=users.tenant)
        found = await gateway.in_thread(partial(whose, all_tenants=users.all_users, after=after, limit=limit))
        position = found[-1].effect_id if len(found) == limit else None
    if position is not None:
        query = urlencode({"after": position, "limit": limit, **({} if user_id is None else {"user_id": user_id})})
        response.headers["Link"] = f'<?{query}>; rel="next"'
    return [WaitingApproval.model_validate(call.body) for call in found]


@router.post(
    "/feedback",
    status_code=HTTPStatus.ACCEPTED,
    response_description="Recorded. The body is the turn's current state.",
    response_model_exclude_unset=True,
    responses=problems(*WITH_BODY, 409),
)
async def feedback(turn_id: TheTurn, given: FeedbackBody, gateway: TheGateway) -> Turn:
    """Rate a reply: 1 is helpful, -1 is not. The latest rating counts.

    A reply rated 1 becomes a case if the agent uses a CaseBank.
    """
    return await _after(gateway, turn_id, lambda: give_feedback(gateway.runtime, turn_id, given))


async def _after(gateway: Gateway, turn_id: UUID, act: Callable[[], object]) -> Turn:
    """Call `act` and then read the turn, in one thread. Returns the turn."""

    def act_and_read() -> Turn:
        act()
        return _read(gateway, turn_id)

    return await gateway.in_thread(act_and_read)


def _timeline(runtime: Runtime, turn_id: UUID) -> Timeline:
    found = read_timeline(runtime.database, turn_id)
    spent = cost_of(runtime.database, turn_id, runtime.settings, runtime.agents)
    return Timeline.model_validate({**found, "cost_usd": None if spent is None else f"{spent.normalize():f}"})


def _read(gateway: Gateway, turn_id: UUID) -> Turn:
    return Turn.model_validate(read_turn(gateway.runtime.database, turn_id))
