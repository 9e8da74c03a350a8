"""`/v1/casebank`: searches for similar cases, and lets administrators share and unshare cases."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AfterValidator, Field

from perdure.access.tenants import UserKey, user_of
from perdure.casebank import sharing
from perdure.casebank.search import EVERYBODY, FoundCase, Within
from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited
from perdure.channels.http.auth import KeyKind
from perdure.channels.http.dependencies import TheAdministrator, TheCaller, TheGateway, TheUsers, Users
from perdure.channels.http.schemas.answer import WITH_EMBEDDING, WITH_KEY, problems
from perdure.channels.http.schemas.casebank import NearCases, SharedCase, UnsharedCase
from perdure.errors import Forbidden, InvalidRequest
from perdure.runtime import Runtime
from perdure.text.untrusted import IDENTIFIER_PATTERN, identifier

MAX_K = 100

_ADMINISTRATOR = "an admin key"
"""The actor in a case's history if an administrator shares the case or ends its sharing."""

router = APIRouter(prefix="/casebank", tags=["casebank"], responses=problems(*WITH_KEY))

K = Annotated[int, Query(ge=1, le=MAX_K, description="At most this many cases.")]
IncludeArchived = Annotated[
    bool, Query(description="Also archived cases. Requires an admin key; not together with `user_id`.")
]
Reader = Annotated[
    parameters.User | None,
    Query(
        description="Only cases that this user's prompts may contain. Default: the user token's user; with an admin "
        "key, all cases."
    ),
]
Bank = Annotated[
    Annotated[str, AfterValidator(identifier), Field(json_schema_extra={"pattern": IDENTIFIER_PATTERN})] | None,
    Query(description="Only cases of this bank."),
]


@router.get("/search", response_description="The nearest cases.", responses=problems(400, *WITH_EMBEDDING))
async def search(
    q: parameters.CaseQuery,
    gateway: TheGateway,
    caller: TheCaller,
    users: TheUsers,
    k: K = 10,
    *,
    user_id: Reader = None,
    bank: Bank = None,
    include_archived: IncludeArchived = False,
) -> NearCases:
    """List the cases whose questions are nearest to `q`, nearest first.

    With a user token, `user_id` is the token's user by default. A case's `user_id` names its author. A user token sees
    only its own user's name there.
    """
    if user_id is None and caller.user is not None:
        user_id = user_of(caller.user)
    if user_id is None and caller.kind is not KeyKind.ADMIN:
        raise Forbidden("Name a user_id: only an admin key searches the cases of all users.")
    if include_archived and user_id is not None:
        raise Forbidden("Archived cases enter no prompt: search them with an admin key and without user_id.")
    if not q.strip():
        raise InvalidRequest("q is empty.")
    return await gateway.in_thread(
        partial(_search, gateway.runtime, users, q, k, user_id=user_id, bank=bank, include_archived=include_archived)
    )


# Callers choose the ids of cases, so an id may contain slashes.
@router.post(
    "/cases/{case_id:path}/share",
    response_description="Shared.",
    responses=problems(404, 409),
    dependencies=[audited("cases.share", "case_id")],
)
async def share(case_id: str, gateway: TheGateway, _admin: TheAdministrator) -> SharedCase:
    """Share one user's case with all users of its bank in the same tenant."""
    name = parameters.parse_name(case_id, "case")
    at = await gateway.in_thread(partial(sharing.share, gateway.runtime.database, name, _ADMINISTRATOR))
    return SharedCase(case_id=name, shared_at=at.isoformat())


@router.delete(
    "/cases/{case_id:path}/share",
    response_description="No longer shared.",
    responses=problems(404, 409),
    dependencies=[audited("cases.unshare", "case_id")],
)
async def unshare(case_id: str, gateway: TheGateway, _admin: TheAdministrator) -> UnsharedCase:
    """Stop sharing a case. Afterwards, only the prompts of the case's author may contain the case."""
    name = parameters.parse_name(case_id, "case")
    await gateway.in_thread(partial(sharing.unshare, gateway.runtime.database, name, _ADMINISTRATOR))
    return UnsharedCase(case_id=name, shared_at=None)


def _search(
    runtime: Runtime,
    users: Users,
    query: str,
    k: int,
    *,
    user_id: str | None,
    bank: str | None,
    include_archived: bool,
) -> NearCases:
    if user_id is not None:
        cases = runtime.cases.visible_to(users.key(user_id), query, k, bank=bank)
    else:
        within = EVERYBODY if users.all_users else Within(users.tenant)
        cases = runtime.cases.nearest(query, k, within, bank=bank, include_archived=include_archived)
    return NearCases.model_validate({"results": [_record(each, users.caller.user) for each in cases]})


def _record(case: FoundCase, reader: UserKey | None) -> dict[str, Any]:
    """The case as the route returns it. `reader`: the user key of a user token, which sees no other user's name."""
    record = case.to_dict()
    return record if reader is None or case.author == reader else {**record, "user_id": None}
