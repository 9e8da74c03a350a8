"""`/v1/casebank`: questions answered before, searched by meaning as turns do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from perdure.channels.http.gateway import TheCaller, TheGateway
from perdure.channels.http.schema import NEAR_CASES
from perdure.errors import InvalidRequest
from perdure.runtime import Runtime
from perdure.turns.recalling import cases_near

MAX_K = 100

router = APIRouter(prefix="/casebank", tags=["casebank"])

Asked = Annotated[str, Query(min_length=1, description="What is asked.")]
K = Annotated[int, Query(ge=1, le=MAX_K, description="How many.")]
IncludeArchived = Annotated[bool, Query(description="Archived ones, too.")]


@router.get("/search", responses=NEAR_CASES)
async def search(
    q: Asked, gateway: TheGateway, _caller: TheCaller, k: K = 10, *, include_archived: IncludeArchived = False
) -> Response:
    """Search the cases of all users whose questions are nearest to `q`, nearest first; `user_id` is the author."""
    return await gateway.answer(lambda: _search(gateway.runtime, q, k, include_archived=include_archived))


def _search(runtime: Runtime, query: str, k: int, *, include_archived: bool) -> dict[str, Any]:
    if not query.strip():
        raise InvalidRequest("q is empty.")
    found = cases_near(runtime, query, k, include_archived=include_archived)
    return {"results": [asdict(each) for each in found]}
