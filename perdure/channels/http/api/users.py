"""`/v1/users`: everything that is held about a user, to take along or to erase."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from perdure.channels.http import requests
from perdure.channels.http.gateway import TheGateway
from perdure.channels.http.schema import ERASED, EXPORT
from perdure.channels.http.tenant_access import TheUsers
from perdure.runtime import Runtime
from perdure.turns.erasing import erase as erase_user
from perdure.users.export import export_user

router = APIRouter(prefix="/users", tags=["users"])


@router.get("/{user_id}/export", responses=EXPORT)
async def export(user_id: requests.UserPath, gateway: TheGateway, users: TheUsers) -> Response:
    """Read everything that is held about a user: the rows of each table, by table."""
    runtime, key = gateway.runtime, users.key(user_id)
    return await gateway.answer(partial(export_user, runtime.database, runtime.clock, runtime.redis_memory, key))


@router.delete("/{user_id}", responses=ERASED)
async def erase(user_id: requests.UserPath, gateway: TheGateway, users: TheUsers) -> Response:
    """Erase a user: what they said and what was made of it; how many rows that were, by table.

    Who is not known has nothing to erase: that is no error, and neither is asking twice.
    """
    return await gateway.answer(partial(_erase, gateway.runtime, users.key(user_id), user_id))


def _erase(runtime: Runtime, key: str, user_id: str) -> dict[str, Any]:
    return {"user_id": user_id, **asdict(erase_user(runtime, key))}
