"""`/v1/sessions`: lists, reads, ends and forks sessions, and reads their transcripts."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Request, Response

from perdure.access.tenants import UserKey
from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited
from perdure.channels.http.auth import KeyKind
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheSession, TheUsers, Users
from perdure.channels.http.limits.shares import CHUNKED_BYTES
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.sessions import EndSession, Forked, ForkSession, Message, QueuedTurn, Session
from perdure.errors import Forbidden
from perdure.runtime import Runtime
from perdure.sessions.ending import request_end
from perdure.sessions.forking import fork as fork_session
from perdure.sessions.reading import list_sessions, message_pages, owner, read_queue, read_session
from perdure.sessions.routing import scope_of
from perdure.text.chunks import joined, json_list
from perdure.turns.inbox import rate_limit

router = APIRouter(prefix="/sessions", tags=["sessions"], route_class=StrictRoute, responses=problems(*WITH_KEY))

_DEFAULT_LIMIT = 100
_DEFAULT_QUEUE = 20
_SESSION_BYTES = 2**13
"""The memory of one session in a list: its summary and the response's text."""
_DEFAULT_REASON = "requested over HTTP"
_NAME_ONE = "Name a user_id: only an admin key lists the sessions of all users."


@router.get("", response_description="The sessions, newest first.", responses=problems(400))
async def list_(
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    users: TheUsers,
    *,
    user_id: parameters.UserId = None,
    conversation: parameters.ConversationKey = None,
    channel: parameters.SessionChannel = None,
    limit: parameters.SessionLimit = _DEFAULT_LIMIT,
) -> list[Session]:
    """List a user's sessions, newest first.

    With an admin key, `user_id` may be omitted: the list then covers all users that the key may access. With a user
    token, `user_id` is the token's user by default. With `channel`, the list has the sessions of the default
    conversation: those of messages from that channel that name neither a conversation nor a session. Only an admin key
    lists the sessions in which one agent answers another; `parent_turn_id` is the turn that asked.
    """
    of_all = user_id is None and caller.user is None
    if of_all and caller.kind is not KeyKind.ADMIN:
        raise Forbidden(_NAME_ONE)
    user = None if of_all else users.key(user_id)
    await gateway.reserve(request, user, limit * _SESSION_BYTES)
    delegated = caller.kind is KeyKind.ADMIN
    scope = None
    if conversation is not None or channel is not None:
        scope = scope_of(gateway.runtime.settings.session.scope, channel or "", conversation)
    given = (gateway.runtime, users, user, scope, limit)
    return await gateway.in_thread(partial(_list, *given, delegated=delegated))


@router.get("/{session_id}", response_description="The session.", responses=problems(404))
async def read(session_id: TheSession, gateway: TheGateway) -> Session:
    """Read a session."""
    return await gateway.in_thread(partial(_read, gateway.runtime, session_id))


@router.post(
    "/{session_id}/end",
    status_code=HTTPStatus.ACCEPTED,
    response_description="Requested; the session as it is now.",
    responses=problems(*WITH_BODY, 404, 409),
    dependencies=[audited("sessions.end", "session_id")],
)
async def end(
    session_id: TheSession, given: Annotated[EndSession, Body(default_factory=EndSession)], gateway: TheGateway
) -> Session:
    """Request the end of a session.

    Turns that were accepted before the request run first. The first message after the request begins the next session.
    """
    return await gateway.in_thread(partial(_end, gateway.runtime, session_id, given.reason))


@router.post(
    "/{session_id}/fork",
    status_code=HTTPStatus.CREATED,
    response_description="The copy; messages with its `session_id` go to it.",
    responses=problems(*WITH_BODY, 404, 409, 429),
    dependencies=[audited("sessions.fork", "session_id")],
)
async def fork(
    session_id: TheSession, given: Annotated[ForkSession, Body(default_factory=ForkSession)], gateway: TheGateway
) -> Forked:
    """Copy a session as it was at `tick`: with the turns that were settled at or before this tick.

    Only messages whose `session_id` is the copy's id go to the copy. A fork counts as one of the user's messages.
    """
    return await gateway.in_thread(partial(_fork, gateway.runtime, session_id, given.tick))


@router.get(
    "/{session_id}/queue",
    response_description="The turns, in the order in which they run.",
    responses=problems(400, 404),
)
async def queue(
    session_id: TheSession, gateway: TheGateway, limit: parameters.QueueLimit = _DEFAULT_QUEUE
) -> list[QueuedTurn]:
    """List the unsettled turns of a session with their messages: the turn that runs, and those that wait for it.

    The transcript has a message from its turn's first commit on, this list until the turn is settled.
    """
    return await gateway.in_thread(partial(_queue, gateway.runtime, session_id, limit))


@router.get(
    "/{session_id}/messages",
    response_model=list[Message],
    response_description="The transcript.",
    responses=problems(400, 404),
)
async def messages(
    session_id: TheSession,
    request: Request,
    gateway: TheGateway,
    after: parameters.After = 0,
    limit: parameters.MessageLimit = None,
) -> Response:
    """Read the committed transcript in order; `after` and `limit` select a part of it."""
    database = gateway.runtime.database
    await gateway.reserve(request, await gateway.in_thread(partial(owner, database, session_id)), CHUNKED_BYTES)
    return await gateway.json_in_chunks(joined(json_list(message_pages(database, session_id, after, limit))))


def _list(
    runtime: Runtime, users: Users, user: UserKey | None, scope: str | None, limit: int, *, delegated: bool
) -> list[Session]:
    if user is not None:
        rows = list_sessions(runtime.database, user, limit, scope=scope, delegated=delegated)
    elif scope is not None:
        raise Forbidden("Name a user_id: a conversation belongs to one user.")
    elif users.all_users:
        rows = list_sessions(runtime.database, limit=limit)
    elif users.tenant is None:
        raise Forbidden(_NAME_ONE)
    else:
        rows = list_sessions(runtime.database, tenant=users.tenant, limit=limit)
    return [Session.model_validate(row) for row in rows]


def _queue(runtime: Runtime, session_id: UUID, limit: int) -> list[QueuedTurn]:
    return [QueuedTurn.model_validate(each) for each in read_queue(runtime.database, session_id, limit)]


def _read(runtime: Runtime, session_id: UUID) -> Session:
    return Session.model_validate(read_session(runtime.database, session_id))


def _fork(runtime: Runtime, session_id: UUID, tick: int | None) -> Forked:
    clock, guard = runtime.clock, runtime.settings.guard
    with runtime.database.transaction("sessions.fork") as transaction:
        rate_limit.meter(transaction, clock, guard, owner(transaction, session_id), "fork")
        return Forked(session_id=fork_session(transaction, clock, session_id, tick, most_open=guard.open_forks))


def _end(runtime: Runtime, session_id: UUID, reason: str | None) -> Session:
    requested = request_end(runtime.database, session_id, _DEFAULT_REASON if reason is None else reason)
    requested.wake(runtime.wake)
    return _read(runtime, session_id)
