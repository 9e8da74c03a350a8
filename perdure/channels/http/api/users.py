"""`/v1/users`: export and erasure of a user's data."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from fastapi import APIRouter, Response

from perdure.channels.http import parameters
from perdure.channels.http.dependencies import TheGateway, TheUsers
from perdure.channels.http.schemas.answer import WITH_KEY, problems
from perdure.channels.http.schemas.users import Erased, Export
from perdure.users.export import export_user

router = APIRouter(prefix="/users", tags=["users"], responses=problems(*WITH_KEY, 400))


@router.get("/{user_id}/export", response_model=Export, response_description="The export.", responses=problems(404))
async def export(user_id: parameters.UserPath, gateway: TheGateway, users: TheUsers) -> Response:
    """Read everything that is held about a user: the rows of each table, by table."""
    runtime, key = gateway.runtime, users.key(user_id)
    return await gateway.json_response(partial(export_user, runtime.database, runtime.clock, runtime.redis_memory, key))


@router.delete("/{user_id}", response_description="Erased.")
async def erase(user_id: parameters.UserPath, gateway: TheGateway, users: TheUsers) -> Erased:
    """Erase a user's messages and everything derived from them; the answer counts the rows, by table.

    Erasing an unknown user, or a user a second time, is no error.
    """
    erased = await gateway.in_thread(partial(gateway.runtime.eraser.erase, users.key(user_id)))
    return Erased(user_id=user_id, **asdict(erased))
