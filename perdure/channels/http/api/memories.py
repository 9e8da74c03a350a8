"""`/v1/memories`: what is remembered of a user, to see, to correct and to forget."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Depends, Response

from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheUsers
from perdure.channels.http.parameters import parse_id
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.memory import CorrectMemory, Memory, MemoryWithSources
from perdure.errors import NotFound
from perdure.memory import owned
from perdure.memory.recall.agent_memory import forget
from perdure.runtime import Runtime

router = APIRouter(
    prefix="/memories", tags=["memory"], route_class=StrictRoute, responses=problems(*WITH_KEY, 400, 404)
)

_DEFAULT_LIMIT = 100


async def _memory(memory_id: parameters.IdPath, gateway: TheGateway, caller: TheCaller) -> UUID:
    parsed = parse_id(memory_id, "memory")
    owner = await gateway.in_thread(partial(owned.owner, gateway.runtime.database, parsed))
    if not caller.is_operator and not caller.may_see(owner):
        raise NotFound("There is no such memory.")
    return parsed


TheMemory = Annotated[UUID, Depends(_memory)]
"""The id of the memory in the path. A caller without access to the memory gets 404."""


@router.get("", response_description="The memories, the newest first.")
async def list_(
    gateway: TheGateway,
    users: TheUsers,
    *,
    user_id: parameters.Owner = None,
    after: parameters.MemoryAfter = None,
    limit: parameters.MemoryLimit = _DEFAULT_LIMIT,
) -> list[Memory]:
    """List what is remembered of a user, what has been superseded included.

    With a user token, `user_id` is the token's user by default.
    """
    user = users.queried(user_id)
    found = await gateway.in_thread(partial(owned.list_memories, gateway.runtime.database, user, limit, after))
    return [Memory.model_validate(each) for each in found]


@router.get("/{memory_id}", response_description="The memory.")
async def read(memory_id: TheMemory, gateway: TheGateway) -> MemoryWithSources:
    """Show one memory, with the messages that it came from, and the turns whose prompts had it."""
    return MemoryWithSources.model_validate(
        await gateway.in_thread(partial(owned.read_with_sources, gateway.runtime.database, memory_id))
    )


@router.patch(
    "/{memory_id}",
    response_description="The new memory.",
    responses=problems(*WITH_BODY, 409),
    dependencies=[audited("memories.correct", "memory_id")],
)
async def correct(memory_id: TheMemory, changes: Annotated[CorrectMemory, Body()], gateway: TheGateway) -> Memory:
    """Correct a memory. The answer is the memory that supersedes this one: a new one, or one that has these words."""
    return await gateway.in_thread(partial(_correct, gateway.runtime, memory_id, changes.content))


@router.delete(
    "/{memory_id}",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    response_description="Forgotten.",
    dependencies=[audited("memories.forget", "memory_id")],
)
async def forget_(memory_id: TheMemory, gateway: TheGateway) -> Response:
    """Forget a memory. No memory is extracted from its source messages again. The messages stay."""
    await gateway.in_thread(partial(_forget, gateway.runtime, memory_id))
    return Response(status_code=HTTPStatus.NO_CONTENT)


def _correct(runtime: Runtime, memory_id: UUID, content: str) -> Memory:
    user_id = owned.owner(runtime.database, memory_id)
    return Memory.model_validate(owned.correct(runtime.database, runtime.clock, user_id, memory_id, content))


def _forget(runtime: Runtime, memory_id: UUID) -> None:
    if not forget(runtime.database, owned.owner(runtime.database, memory_id), memory_id):
        raise NotFound("There is no such memory.")
