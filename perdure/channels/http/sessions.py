"""`/v1/sessions`: conversations and their transcripts."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from perdure.channels.http import requests
from perdure.channels.http.auth import Caller
from perdure.channels.http.gateway import TheCaller, TheGateway
from perdure.channels.http.schema import MESSAGES, SESSION, SESSIONS
from perdure.errors import Forbidden
from perdure.sessions.reading import list_sessions, read_messages, read_session

router = APIRouter(prefix="/sessions", tags=["sessions"])

_DEFAULT_LIMIT = 100


@router.get("", responses=SESSIONS)
async def list_(
    gateway: TheGateway,
    caller: TheCaller,
    user_id: requests.UserId = None,
    limit: requests.SessionLimit = _DEFAULT_LIMIT,
) -> Response:
    """List a user's sessions, newest first."""
    if user_id is None and caller is not Caller.ADMIN:
        raise Forbidden("Name a user_id: only an admin key lists everybody's sessions.")
    return await gateway.answer(partial(list_sessions, gateway.runtime.database, user_id, limit))


@router.get("/{session_id}", responses=SESSION)
async def read(session_id: str, gateway: TheGateway, _caller: TheCaller) -> Response:
    """Read a session."""
    wanted = requests.parse_id(session_id, "session")
    return await gateway.answer(partial(read_session, gateway.runtime.database, wanted))


@router.get("/{session_id}/messages", responses=MESSAGES)
async def messages(
    session_id: str,
    gateway: TheGateway,
    _caller: TheCaller,
    after: requests.After = 0,
    limit: requests.MessageLimit = None,
) -> Response:
    """Read the committed transcript in order, all of it unless `after` or `limit` are given."""
    wanted = requests.parse_id(session_id, "session")
    return await gateway.answer(partial(read_messages, gateway.runtime.database, wanted, after, limit))
