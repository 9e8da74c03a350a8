"""`/v1/sessions`: conversations and their transcripts."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response

from perdure.channels.http import requests
from perdure.channels.http.auth import Kind
from perdure.channels.http.gateway import TheCaller, TheGateway
from perdure.channels.http.schema import ENDING, FORKED, MESSAGES, REASON, SESSION, SESSIONS, TICK
from perdure.channels.http.tenant_access import TheSession, TheUsers, Users
from perdure.errors import Forbidden
from perdure.runtime import Runtime
from perdure.sessions.ending import request_end
from perdure.sessions.forking import fork as fork_session
from perdure.sessions.forking import parse_tick
from perdure.sessions.reading import list_sessions, read_messages, read_session
from perdure.turns.inbox.incoming import parse_reason

router = APIRouter(prefix="/sessions", tags=["sessions"])

_DEFAULT_LIMIT = 100
_ASKED = "asked for over HTTP"
_NAME_ONE = "Name a user_id: only an admin key lists everybody's sessions."


@router.get("", responses=SESSIONS)
async def list_(
    gateway: TheGateway,
    caller: TheCaller,
    users: TheUsers,
    user_id: requests.UserId = None,
    limit: requests.SessionLimit = _DEFAULT_LIMIT,
) -> Response:
    """List a user's sessions, newest first; with an admin key also those of all users that it reaches."""
    if user_id is None and caller.kind is not Kind.ADMIN:
        raise Forbidden(_NAME_ONE)
    return await gateway.answer(partial(_list, gateway.runtime, users, user_id, limit))


@router.get("/{session_id}", responses=SESSION)
async def read(session_id: TheSession, gateway: TheGateway) -> Response:
    """Read a session."""
    return await gateway.answer(partial(read_session, gateway.runtime.database, session_id))


@router.post("/{session_id}/end", status_code=HTTPStatus.ACCEPTED, responses=ENDING, openapi_extra=REASON)
async def end(session_id: TheSession, request: Request, gateway: TheGateway) -> Response:
    """Ask for a session to end: its turns are run first, later messages begin the next one."""
    body = await requests.read_body(request)
    return await gateway.answer(lambda: _end(gateway.runtime, session_id, body), HTTPStatus.ACCEPTED)


@router.post("/{session_id}/fork", status_code=HTTPStatus.CREATED, responses=FORKED, openapi_extra=TICK)
async def fork(session_id: TheSession, request: Request, gateway: TheGateway) -> Response:
    """Copy a session through its last settled turn at or before a tick, into one that only its id reaches."""
    body = await requests.read_body(request)
    return await gateway.answer(lambda: _fork(gateway.runtime, session_id, body), HTTPStatus.CREATED)


@router.get("/{session_id}/messages", responses=MESSAGES)
async def messages(
    session_id: TheSession,
    gateway: TheGateway,
    after: requests.After = 0,
    limit: requests.MessageLimit = None,
) -> Response:
    """Read the committed transcript in order, all of it unless `after` or `limit` are given."""
    return await gateway.answer(partial(read_messages, gateway.runtime.database, session_id, after, limit))


def _list(runtime: Runtime, users: Users, user_id: str | None, limit: int) -> list[dict[str, Any]]:
    if user_id is not None:
        return list_sessions(runtime.database, users.key(user_id), limit)
    if users.everybody:
        return list_sessions(runtime.database, limit=limit)
    if users.tenant is None:
        raise Forbidden(_NAME_ONE)
    return list_sessions(runtime.database, tenant=users.tenant, limit=limit)


def _end(runtime: Runtime, session_id: UUID, body: bytes) -> dict[str, Any]:
    reason = requests.optional_member(body, "reason")
    requested = request_end(runtime.database, session_id, _ASKED if reason is None else parse_reason(reason))
    requested.wake(runtime.wake)
    return read_session(runtime.database, session_id)


def _fork(runtime: Runtime, session_id: UUID, body: bytes) -> dict[str, str]:
    tick = parse_tick(requests.optional_member(body, "tick"))
    return {"session_id": str(fork_session(runtime.database, runtime.clock, session_id, tick))}
