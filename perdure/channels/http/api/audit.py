"""`/v1/audit`: what operators did, for administrators."""

from __future__ import annotations

from functools import partial
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from perdure import audit
from perdure.channels.http.dependencies import TheAdministrator, TheGateway
from perdure.channels.http.schemas.answer import WITH_KEY, problems
from perdure.channels.http.schemas.audit import Audited

router = APIRouter(prefix="/audit", tags=["operating"], responses=problems(*WITH_KEY, 400))

_DEFAULT_LIMIT = 100

Before = Annotated[UUID | None, Query(description="Only actions before this one, an `audit_id`.")]
Limit = Annotated[int, Query(ge=1, le=1_000, description="At most this many actions.")]


@router.get("", response_description="The actions, the newest first.")
async def list_(
    gateway: TheGateway, _admin: TheAdministrator, before: Before = None, limit: Limit = _DEFAULT_LIMIT
) -> list[Audited]:
    """List what operators did over the API, in the console and by commands, the newest first.

    Actions are kept for `PERDURE_RETENTION__AUDIT_DAYS` days. Those on a user's data are erased with the user.
    """
    found = await gateway.in_thread(partial(audit.list_actions, gateway.runtime.database, limit, before))
    return [Audited.model_validate(each) for each in found]
