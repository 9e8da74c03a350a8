"""`/v1/memory`: what is known of a user and what was said, searched as their agent does; and consolidated."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from perdure.channels.http import requests
from perdure.channels.http.auth import Caller
from perdure.channels.http.gateway import Gateway, TheCaller, TheGateway
from perdure.channels.http.schema import CONSOLIDATING, FOUND, SEARCH, SESSION_ID, Search
from perdure.channels.http.tenant_access import TheUsers, Users, require_session
from perdure.errors import Forbidden, InvalidRequest
from perdure.memory.consolidation.consolidate import retry_abandoned
from perdure.runtime import Runtime
from perdure.sessions.reading import read_session
from perdure.text.untrusted import what_is_wrong
from perdure.turns.prompt.recalling import recall_of

router = APIRouter(prefix="/memory", tags=["memory"])


@router.post("/search", responses=FOUND, openapi_extra=SEARCH)
async def search(request: Request, gateway: TheGateway, users: TheUsers) -> Response:
    """Search what a user said, was told and is known of, best first."""
    body = await requests.read_body(request)
    return await gateway.answer(lambda: _search(gateway.runtime, users, body))


@router.post("/consolidate", status_code=HTTPStatus.ACCEPTED, responses=CONSOLIDATING, openapi_extra=SESSION_ID)
async def consolidate(request: Request, gateway: TheGateway, caller: TheCaller) -> Response:
    """Ask for memories to be drawn from an ended session, also one that was given up; without one, from a batch."""
    body = await requests.read_body(request)
    return await gateway.answer(lambda: _consolidate(gateway, caller, body), HTTPStatus.ACCEPTED)


def _search(runtime: Runtime, users: Users, body: bytes) -> dict[str, Any]:
    try:
        asked = Search.model_validate(requests.parse_object(body))
    except ValidationError as error:
        raise InvalidRequest(" ".join(_sentence(item) for item in error.errors(include_input=False))) from None
    found = recall_of(runtime).search(users.key(asked.user_id), asked.query, asked.k, asked.layers)
    return {"results": [each.as_json() for each in found]}


def _sentence(item: Any) -> str:
    return f"{'.'.join(str(part) for part in item['loc'])}: {what_is_wrong(item)}."


def _consolidate(gateway: Gateway, caller: Caller, body: bytes) -> dict[str, Any]:
    runtime = gateway.runtime
    given = requests.optional_member(body, "session_id")
    session_id = None
    if given is None and caller.tenant is not None:
        raise Forbidden("Name a session_id: a batch is of all tenants' sessions, and takes a key without a tenant.")
    if given is not None:
        if not isinstance(given, str):
            raise InvalidRequest("session_id: must be a UUID.")
        session_id = requests.parse_id(given, "session")
        require_session(gateway, caller, session_id)
        read_session(runtime.database, session_id)
        settings = runtime.settings
        retry_abandoned(runtime.database, settings.consolidation, settings.turn.lease_s, [session_id])
    runtime.wake.consolidation(session_id)
    return {"session_id": None if session_id is None else str(session_id)}
