"""`/v1/breakers`: the fleet's circuit breakers, for administrators."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from perdure.channels.http.gateway import TheAdministrator, TheGateway
from perdure.channels.http.schema import BREAKER, BREAKERS
from perdure.resilience.registry import Breakers, Switchboard
from perdure.runtime import Runtime

router = APIRouter(prefix="/breakers", tags=["breakers"])


@router.get("", responses=BREAKERS)
async def list_(gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """List the breakers that were asked in the last week, by name."""
    return await gateway.answer(lambda: _list(gateway.runtime))


@router.post("/{name:path}/reset", responses=BREAKER)
async def reset(name: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Close a breaker for the whole fleet: it admits calls, and parked turns resume.

    A model's name may contain slashes (`llm:openai:org/model`), escaped or not.
    """
    return await gateway.answer(lambda: _breakers(gateway.runtime).reset(name).record())


def _list(runtime: Runtime) -> dict[str, list[dict[str, Any]]]:
    return {"breakers": [each.record() for each in _breakers(runtime).list()]}


def _breakers(runtime: Runtime) -> Switchboard:
    """The fleet's, or none where this process was given none."""
    return runtime.breakers or Breakers(runtime.settings.breaker, runtime.clock)
