"""`/v1/consolidation`: lets administrators prune the CaseBank, approve or reject a plan, and restore cases."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Body, Query, Request, Response

from perdure.casebank import archive
from perdure.casebank.runs import state
from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheAdministrator, TheGateway
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.casebank import (
    DryRun,
    NoMembers,
    Pruned,
    PruningProgress,
    PruningRun,
    ReportLine,
    Restored,
)

router = APIRouter(prefix="/consolidation", tags=["casebank"], route_class=StrictRoute, responses=problems(*WITH_KEY))

_ADMINISTRATOR = "an admin key"
"""The value of a run's `decided_by` if the plan was approved or rejected over HTTP."""

_DEFAULT_WAIT_S = 10.0
_DEFAULT_LIMIT = 20

OfAction = Annotated[
    Literal["remove", "merge", "archive", "spare"] | None, Query(description="Only cases with this action.")
]
AfterLine = Annotated[int, Query(ge=-1, le=2**31 - 1, description="Only lines with a greater `position`.")]
Empty = Annotated[NoMembers, Body(default_factory=NoMembers)]


@router.post(
    "/run",
    response_model=Pruned,
    response_description="The run is finished.",
    responses={
        202: {
            "model": Pruned | PruningProgress,
            "description": "The plan that waits for approval, or the progress of an unfinished run.",
        },
        **problems(*WITH_BODY, 409),
    },
    dependencies=[audited("cases.prune")],
)
async def run(
    _body: Empty,
    request: Request,
    gateway: TheGateway,
    _admin: TheAdministrator,
    wait: parameters.RunWait = _DEFAULT_WAIT_S,
) -> Response:
    """Request a run that prunes the CaseBank. The status is 202 if the run is unfinished or waits for approval."""
    return await _run(gateway, request, wait, dry_run=False)


@router.post(
    "/dry-run",
    response_model=DryRun,
    response_description="The plan that a run would make now.",
    responses={
        202: {"model": PruningProgress, "description": "The progress of the unfinished dry run."},
        **problems(*WITH_BODY),
    },
)
async def dry_run(
    _body: Empty,
    request: Request,
    gateway: TheGateway,
    _admin: TheAdministrator,
    wait: parameters.RunWait = _DEFAULT_WAIT_S,
) -> Response:
    """Request the plan that a run would make now. No case is changed. The status is 202 if the plan is unfinished."""
    return await _run(gateway, request, wait, dry_run=True)


@router.get(
    "/runs",
    response_model=list[PruningProgress],
    response_description="The runs, newest first.",
    responses=problems(400),
)
async def list_(gateway: TheGateway, _admin: TheAdministrator, limit: parameters.RunLimit = _DEFAULT_LIMIT) -> Response:
    """List runs and dry runs, newest first, without their plans."""
    return await gateway.json_response(partial(state.list_runs, gateway.runtime.database, limit))


@router.get("/runs/{run_id}", response_model=PruningRun, response_description="The run.", responses=problems(404))
async def read(run_id: parameters.IdPath, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Read the progress of a run, its plan and its outcome."""
    return await gateway.json_response(partial(state.read_run, gateway.runtime.database, _parse_id(run_id)))


@router.get(
    "/runs/{run_id}/report",
    response_model=list[ReportLine],
    response_description="The lines, in the order in which the plan is applied.",
    responses=problems(400, 404),
)
async def report(
    run_id: parameters.IdPath,
    gateway: TheGateway,
    _admin: TheAdministrator,
    *,
    action: OfAction = None,
    after: AfterLine = -1,
    limit: parameters.RunLimit = _DEFAULT_LIMIT,
) -> Response:
    """Read a run's plan with the texts of its cases, and of duplicates next to each other."""
    parsed, database = _parse_id(run_id), gateway.runtime.database
    lines = partial(state.read_report, database, parsed, action=action, after=after, most=limit)
    return await gateway.json_response(lambda: [_shown(each) for each in lines()])


@router.post(
    "/runs/{run_id}/approve",
    response_model=PruningRun,
    status_code=HTTPStatus.ACCEPTED,
    response_description="Decided; the run as it is now.",
    responses=problems(404, 409),
    dependencies=[audited("cases.approve", "run_id")],
)
async def approve(run_id: parameters.IdPath, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Approve a plan that waits for approval; a worker then applies it."""
    return await _decide(gateway, state.approve, _parse_id(run_id))


@router.post(
    "/runs/{run_id}/reject",
    response_model=PruningRun,
    status_code=HTTPStatus.ACCEPTED,
    response_description="Decided; the run as it is now.",
    responses=problems(404, 409),
    dependencies=[audited("cases.reject", "run_id")],
)
async def reject(run_id: parameters.IdPath, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Reject a plan that waits for approval; no case is changed."""
    return await _decide(gateway, state.reject, _parse_id(run_id))


# Callers choose the ids of cases, so an id may contain slashes.
@router.post(
    "/restore/{case_id:path}",
    response_description="Restored.",
    responses=problems(404),
    dependencies=[audited("cases.restore", "case_id")],
)
async def restore(case_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Restored:
    """Make an archived case active again, with the data that it had when it was archived.

    Runs spare a restored case for `PERDURE_CASEBANK__RECENT_ACCESS_DAYS` days.
    """
    name = parameters.parse_name(case_id, "archived case")
    runtime = gateway.runtime
    await gateway.in_thread(partial(archive.restore, runtime.database, name, runtime.embedder))
    return Restored(case_id=name, status="restored")


async def _run(gateway: Gateway, request: Request, wait: float, *, dry_run: bool) -> Response:
    """Request a run, wait for it for up to `wait` seconds, and respond with its result or its progress.

    A worker executes the run. The request is committed before the wait, so the run continues if the client disconnects
    or the gateway stops.
    """
    runtime = gateway.runtime
    run_id = await gateway.in_thread(partial(state.request, runtime.database, runtime.clock, dry_run=dry_run))
    await gateway.in_thread(runtime.wake.casebank)
    at_rest = partial(state.at_rest, runtime.database, run_id)
    await gateway.until(at_rest, min(wait, parameters.MAX_WAIT_S), request)
    return await gateway.json_response_and_status(partial(_result_or_progress, gateway, run_id))


def _result_or_progress(gateway: Gateway, run_id: UUID) -> tuple[dict[str, Any], int]:
    """The response body and status of `POST /run` and `POST /dry-run`."""
    database = gateway.runtime.database
    progress = state.read_progress(database, run_id)
    if progress["finished_at"] is not None:
        return state.result(database, run_id), HTTPStatus.OK
    if progress["phase"] == state.RunPhase.WAITING_APPROVAL:
        return state.result(database, run_id), HTTPStatus.ACCEPTED
    return progress, HTTPStatus.ACCEPTED


async def _decide(gateway: Gateway, decide: Callable[..., None], run_id: UUID) -> Response:
    def decide_and_read() -> dict[str, Any]:
        decide(gateway.runtime.database, run_id, _ADMINISTRATOR)
        gateway.runtime.wake.casebank()
        return state.read_run(gateway.runtime.database, run_id)

    return await gateway.json_response(decide_and_read, HTTPStatus.ACCEPTED)


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value.isoformat() if isinstance(value, datetime) else value for key, value in line.items()}


def _parse_id(text: str) -> UUID:
    return parameters.parse_id(text, "run of the CaseBank")
