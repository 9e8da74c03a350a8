"""The operator's view of the installation: its condition, live sessions, pauses, usage, and periodic tasks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from perdure.access.tenants import PATTERN, UserKey, parse_tenant, user_key
from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheAdministrator, TheGateway
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.operating import (
    Condition,
    LiveSession,
    NewPause,
    Pause,
    PauseChanged,
    ScheduleEntry,
    UsageRow,
)
from perdure.errors import InvalidRequest, NotFound, PerdureError
from perdure.observe.readings import Latest, Source
from perdure.observe.status import Status, describe_live, explain, judge
from perdure.turns import budgets, costs, pauses

router = APIRouter(tags=["operating"], route_class=StrictRoute, responses=problems(*WITH_KEY))

_DEFAULT_LIMIT = 100
_MOST_STUCK = 20
_DAY_S = 86_400

Limit = Annotated[int, Query(ge=1, le=1_000, description="At most this many sessions, the longest waiting first.")]
StuckAfter = Annotated[float, Query(ge=0, le=366 * _DAY_S, description="Sessions whose oldest turn is older.")]
By = Annotated[Literal["user", "tenant", "agent", "model", "day"], Query(description="What to add up by.")]
Since = Annotated[int, Query(ge=1, le=366 * _DAY_S, description="Turns accepted within the last so many seconds.")]
OfTenant = Annotated[str | None, Query(description="The pause's tenant.", json_schema_extra={"pattern": PATTERN})]
OfUser = Annotated[parameters.User | None, Query(description="The pause's user.")]
OfAgent = Annotated[parameters.User | None, Query(description="The pause's agent.")]


@router.get("/status", response_description="The condition.", responses=problems(400))
async def status(
    request: Request, gateway: TheGateway, _admin: TheAdministrator, stuck_after: StuckAfter = 60
) -> Condition:
    """Report what works and what does not, as `perdure status` does.

    The readings are at most `PERDURE_METRICS__EVERY_S` seconds old.
    """
    state = request.app.state
    read = partial(_status, gateway, state.latest, state.source, stuck_after)
    return Condition.model_validate(await gateway.in_thread(read))


@router.get("/sessions/live", response_description="The sessions.", responses=problems(400))
async def live(
    request: Request, gateway: TheGateway, _admin: TheAdministrator, limit: Limit = _DEFAULT_LIMIT
) -> list[LiveSession]:
    """List the sessions that have an unsettled turn, the longest waiting first, each with what it waits for."""
    state = request.app.state
    found = await gateway.in_thread(partial(_live, state.latest, state.source, limit))
    return [LiveSession.model_validate(each) for each in found]


@router.get("/pauses", response_description="The pauses, the oldest first.")
async def list_pauses(gateway: TheGateway, _admin: TheAdministrator) -> list[Pause]:
    """List whose turns wait."""
    found = await gateway.in_thread(partial(pauses.list_pauses, gateway.runtime.database))
    return [Pause.model_validate(each) for each in found]


@router.post(
    "/pauses",
    response_description="The turns wait.",
    responses=problems(*WITH_BODY),
    dependencies=[audited("pauses.begin")],
)
async def pause(wanted: NewPause, request: Request, gateway: TheGateway, _admin: TheAdministrator) -> PauseChanged:
    """Accept messages of a tenant, user or agent, and let them wait. Turns that are running continue."""
    of = _parts(request, wanted.tenant, wanted.user_id, wanted.agent)
    return await gateway.in_thread(partial(_pause, gateway, of))


@router.delete(
    "/pauses",
    response_description="What has waited runs.",
    responses=problems(400, 404),
    dependencies=[audited("pauses.end")],
)
async def resume(
    request: Request,
    gateway: TheGateway,
    _admin: TheAdministrator,
    *,
    tenant: OfTenant = None,
    user_id: OfUser = None,
    agent: OfAgent = None,
) -> PauseChanged:
    """End the pause with exactly these parts."""
    return await gateway.in_thread(partial(_resume, gateway, _parts(request, tenant, user_id, agent)))


@router.get(
    "/usage", response_description="The sums, the most expensive first; days in order.", responses=problems(400)
)
async def usage(
    gateway: TheGateway,
    _admin: TheAdministrator,
    since_s: Since = _DAY_S,
    by: By = "agent",
    limit: parameters.UsageLimit = None,
) -> list[UsageRow]:
    """Add up what turns used, and what that cost in US dollars. Reads each reply of the time: a long time is slow."""
    since = gateway.runtime.clock.now() - timedelta(seconds=since_s)
    return await gateway.in_thread(partial(_usage, gateway, since, by, limit))


@router.get("/schedule-entries", response_description="The periodic tasks.")
async def schedule_entries(request: Request, gateway: TheGateway, _admin: TheAdministrator) -> list[ScheduleEntry]:
    """List perdure's own periodic tasks: the last slot that was done, and the next one that is due."""
    source: Source = request.app.state.source
    found = await gateway.in_thread(source.entries)
    return [ScheduleEntry.model_validate({key: _plain(value) for key, value in asdict(each).items()}) for each in found]


def _status(gateway: Gateway, latest: Latest, source: Source, stuck_s: float) -> dict[str, Any]:
    read, runtime = latest(), gateway.runtime
    stuck, spent = [], []
    if read.server is not None:  # else each of them would wait for PostgreSQL once more
        with suppress(PerdureError):  # it does not answer since the readings
            stuck = [explain(row, read) for row in source.stuck(stuck_s, _MOST_STUCK)]
            spent = budgets.spent_today(runtime.database, runtime.settings, _MOST_STUCK)
    return Status(read, judge(read), tuple(stuck), tuple(spent)).to_dict()


def _live(latest: Latest, source: Source, limit: int) -> list[dict[str, Any]]:
    read = latest()
    return [describe_live(row, read) for row in source.stuck(0, limit)]


def _parts(request: Request, tenant: str | None, user_id: str | None, agent: str | None) -> dict[str, Any]:
    if tenant is None and user_id is None and agent is None:
        raise InvalidRequest("Give a tenant, a user_id or an agent.")
    named = parse_tenant(tenant)
    user: UserKey | None = None if user_id is None else user_key(named, user_id)
    told = [f"{name} {value}" for name, value in (("tenant", named), ("agent", agent)) if value is not None]
    describe(request, user=user, note=", ".join(told))
    return {"tenant": named, "user": user, "agent": agent}


def _pause(gateway: Gateway, of: dict[str, Any]) -> PauseChanged:
    database = gateway.runtime.database
    pauses.pause(database, **of)
    return PauseChanged(paused=True, turns=pauses.count(database, **of))


def _resume(gateway: Gateway, of: dict[str, Any]) -> PauseChanged:
    database = gateway.runtime.database
    if not pauses.resume(database, **of):
        raise NotFound("There is no such pause.")
    return PauseChanged(paused=False, turns=pauses.count(database, **of))


def _usage(gateway: Gateway, since: datetime, by: str, limit: int | None) -> list[UsageRow]:
    runtime = gateway.runtime
    found = costs.usage(runtime.database, runtime.settings, runtime.agents, since=since, by=by)
    ordered = sorted(found.items(), key=lambda each: (each[0][0] or "",) if by == "day" else (-each[1].cost,))
    return [
        UsageRow(
            name=tenant if by == "tenant" else name,
            tenant=tenant,
            replies=used.replies,
            input_tokens=used.input_tokens,
            cached_tokens=used.cached_tokens,
            output_tokens=used.output_tokens,
            cost_usd=None if used.unpriced == used.replies else f"{used.cost.normalize():f}",
            unpriced=used.unpriced,
        )
        for (name, tenant), used in ordered[:limit]
    ]


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else value
