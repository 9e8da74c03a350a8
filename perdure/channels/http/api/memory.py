"""`/v1/memory`: searches a user's memory, as agents do, and requests the consolidation of sessions."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Request

from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.auth import Caller, KeyKind
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheUsers, Users, require_session
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_EMBEDDING, WITH_KEY, problems
from perdure.channels.http.schemas.memory import Consolidate, ConsolidationRequested, Search, SearchResults
from perdure.errors import Forbidden
from perdure.memory.consolidation.consolidate import retry_abandoned
from perdure.runtime import Runtime
from perdure.sessions.reading import read_session

router = APIRouter(
    prefix="/memory", tags=["memory"], route_class=StrictRoute, responses=problems(*WITH_KEY, *WITH_BODY)
)


@router.post("/search", response_description="The results, best first.", responses=problems(*WITH_EMBEDDING))
async def search(query: Search, gateway: TheGateway, users: TheUsers) -> SearchResults:
    """Search a user's messages and memories, best first."""
    return await gateway.in_thread(partial(_search, gateway.runtime, users, query))


@router.post(
    "/consolidate",
    status_code=HTTPStatus.ACCEPTED,
    response_description="Requested.",
    responses=problems(404),
    dependencies=[audited("memories.consolidate")],
)
async def consolidate(
    wanted: Annotated[Consolidate, Body(default_factory=Consolidate)],
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
) -> ConsolidationRequested:
    """Request the consolidation of one ended session or, without an id, of a batch of pending sessions.

    If the id names a session whose consolidation was abandoned, the consolidation is tried again.
    """
    if wanted.session_id is None:
        if caller.tenant is not None or caller.kind is KeyKind.USER:
            raise Forbidden("Name a session_id: a batch covers all tenants and requires a key without a tenant.")
        await gateway.in_thread(partial(gateway.runtime.wake.consolidation, None))
        return ConsolidationRequested(session_id=None)
    session_id = parameters.parse_id(wanted.session_id, "session")
    describe(request, note=f"session {session_id}")
    await gateway.in_thread(partial(_consolidate, gateway, caller, session_id))
    return ConsolidationRequested(session_id=session_id)


def _search(runtime: Runtime, users: Users, query: Search) -> SearchResults:
    results = runtime.recall.search(users.key(query.user_id), query.query, query.k, query.layers)
    return SearchResults.model_validate({"results": [each.as_json() for each in results]})


def _consolidate(gateway: Gateway, caller: Caller, session_id: UUID) -> None:
    runtime = gateway.runtime
    require_session(gateway, caller, session_id)
    read_session(runtime.database, session_id)
    settings = runtime.settings
    retry_abandoned(runtime.database, settings.consolidation, settings.turn.lease_s, [session_id])
    runtime.wake.consolidation(session_id)
