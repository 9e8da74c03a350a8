"""`/v1/breakers`: the fleet's circuit breakers, for administrators."""

from __future__ import annotations

from fastapi import APIRouter

from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited
from perdure.channels.http.dependencies import TheAdministrator, TheGateway
from perdure.channels.http.schemas.answer import WITH_KEY, problems
from perdure.channels.http.schemas.breakers import Breaker, BreakerList
from perdure.resilience.registry import Breakers, Switchboard
from perdure.runtime import Runtime

router = APIRouter(prefix="/breakers", tags=["breakers"], responses=problems(*WITH_KEY))


@router.get("", response_description="The breakers.", responses=problems(400))
async def list_(
    gateway: TheGateway,
    _admin: TheAdministrator,
    after: parameters.BreakerAfter = None,
    limit: parameters.BreakerLimit = None,
) -> BreakerList:
    """List the breakers that were used in the last week, sorted by name. Each host of a `reply_to` URL has one."""
    breakers = await gateway.in_thread(lambda: _breakers(gateway.runtime).list())
    page = [each for each in breakers if after is None or each.name > after][:limit]
    return BreakerList(breakers=[Breaker.model_validate(each.to_dict()) for each in page])


@router.post(
    "/{name:path}/reset",
    response_description="The breaker, now closed.",
    responses=problems(404),
    dependencies=[audited("breakers.reset", "name")],
)
async def reset(name: str, gateway: TheGateway, _admin: TheAdministrator) -> Breaker:
    """Close a breaker for the whole fleet: it admits calls again, and the turns parked for it resume.

    A breaker's name may contain slashes, for example `llm:openai:org/model`. In the path, a slash may be escaped or
    unescaped.
    """
    called = parameters.parse_name(name, "breaker")
    breaker = await gateway.in_thread(lambda: _breakers(gateway.runtime).reset(called))
    return Breaker.model_validate(breaker.to_dict())


def _breakers(runtime: Runtime) -> Switchboard:
    return runtime.breakers or Breakers(runtime.settings.breaker, runtime.clock)
