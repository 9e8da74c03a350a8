"""`/v1/casebank`: questions answered before, searched by meaning as turns do, and shared by administrators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import AfterValidator, Field

from perdure.casebank import sharing
from perdure.casebank.search import EVERYBODY, Within
from perdure.channels.http import requests
from perdure.channels.http.auth import Kind
from perdure.channels.http.gateway import Gateway, TheAdministrator, TheCaller, TheGateway
from perdure.channels.http.schema import NEAR_CASES, SHARED
from perdure.channels.http.tenant_access import TheUsers, Users
from perdure.errors import Forbidden, InvalidRequest
from perdure.runtime import Runtime
from perdure.text.untrusted import IDENTIFIER_PATTERN, identifier
from perdure.turns.prompt.recalling import cases_near, cases_seen_by

MAX_K = 100

_WHO = "an admin key"

router = APIRouter(prefix="/casebank", tags=["casebank"])

K = Annotated[int, Query(ge=1, le=MAX_K, description="How many.")]
IncludeArchived = Annotated[bool, Query(description="Archived ones, too: an admin key, without `user_id`.")]
Reader = Annotated[
    requests.User | None,
    Query(description="Only cases that this user's prompts could have; without it all, for an admin key."),
]
Bank = Annotated[
    Annotated[str, AfterValidator(identifier), Field(json_schema_extra={"pattern": IDENTIFIER_PATTERN})] | None,
    Query(description="Only cases of this bank."),
]


@router.get("/search", responses=NEAR_CASES)
async def search(
    q: requests.Question,
    gateway: TheGateway,
    caller: TheCaller,
    users: TheUsers,
    k: K = 10,
    *,
    user_id: Reader = None,
    bank: Bank = None,
    include_archived: IncludeArchived = False,
) -> Response:
    """Search the cases whose questions are nearest to `q`, nearest first; a case's `user_id` is its author."""
    if user_id is None and caller.kind is not Kind.ADMIN:
        raise Forbidden("Name a user_id: only an admin key searches the cases of all users.")
    if include_archived and user_id is not None:
        raise Forbidden("Archived cases enter no prompt: they are found with an admin key and without user_id.")
    runtime = gateway.runtime
    return await gateway.answer(
        lambda: _search(runtime, users, q, k, user_id=user_id, bank=bank, include_archived=include_archived)
    )


# A case's id is its maker's own and may hold slashes.
@router.post("/cases/{case_id:path}/share", responses=SHARED)
async def share(case_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Let a case that was made from one user's words enter the prompts of all users of its bank."""
    return await gateway.answer(lambda: _share(gateway, case_id))


@router.delete("/cases/{case_id:path}/share", responses=SHARED)
async def unshare(case_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Let a case enter its author's prompts only."""
    return await gateway.answer(lambda: _unshare(gateway, case_id))


def _search(
    runtime: Runtime,
    users: Users,
    query: str,
    k: int,
    *,
    user_id: str | None,
    bank: str | None,
    include_archived: bool,
) -> dict[str, Any]:
    if not query.strip():
        raise InvalidRequest("q is empty.")
    if user_id is not None:
        found = cases_seen_by(runtime, users.key(user_id), query, k, bank=bank)
    else:
        within = EVERYBODY if users.everybody else Within(users.tenant)
        found = cases_near(runtime, query, k, within, bank=bank, include_archived=include_archived)
    return {"results": [each.record() for each in found]}


def _share(gateway: Gateway, case_id: str) -> dict[str, Any]:
    named = requests.parse_name(case_id, "case")
    return {"case_id": named, "shared_at": sharing.share(gateway.runtime.database, named, _WHO).isoformat()}


def _unshare(gateway: Gateway, case_id: str) -> dict[str, Any]:
    named = requests.parse_name(case_id, "case")
    sharing.unshare(gateway.runtime.database, named, _WHO)
    return {"case_id": named, "shared_at": None}
