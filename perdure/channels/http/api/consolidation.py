"""`/v1/consolidation`: the CaseBank is pruned, decided about and restored from, by administrators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response

from perdure.casebank import archive
from perdure.casebank.runs import state
from perdure.channels.http import requests
from perdure.channels.http.gateway import Gateway, TheAdministrator, TheGateway
from perdure.channels.http.schema import DECIDED, DRY_RUN, NOTHING, PRUNED, PRUNING_RUN, PRUNING_RUNS, RESTORED
from perdure.errors import InvalidRequest
from perdure.text.untrusted import first_line

router = APIRouter(prefix="/consolidation", tags=["casebank"])

_WHO = "an admin key"
_DEFAULT_WAIT_S = 10.0
_DEFAULT_LIMIT = 20


@router.post("/run", responses=PRUNED, openapi_extra=NOTHING)
async def run(
    request: Request, gateway: TheGateway, _admin: TheAdministrator, wait: requests.RunWait = _DEFAULT_WAIT_S
) -> Response:
    """Have a worker prune the CaseBank. 202 while that is unfinished, or with the plan that waits for approval."""
    return await _begun(gateway, request, wait, dry_run=False)


@router.post("/dry-run", responses=DRY_RUN, openapi_extra=NOTHING)
async def dry_run(
    request: Request, gateway: TheGateway, _admin: TheAdministrator, wait: requests.RunWait = _DEFAULT_WAIT_S
) -> Response:
    """Have a worker make the plan that a run would make now; no case changes. 202 if it is not made in time."""
    return await _begun(gateway, request, wait, dry_run=True)


@router.get("/runs", responses=PRUNING_RUNS)
async def list_(gateway: TheGateway, _admin: TheAdministrator, limit: requests.RunLimit = _DEFAULT_LIMIT) -> Response:
    """List runs and dry runs, newest first, without their plans."""
    return await gateway.answer(partial(state.list_runs, gateway.runtime.database, limit))


@router.get("/runs/{run_id}", responses=PRUNING_RUN)
async def read(run_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Read where a run stands, its plan and its outcome."""
    return await gateway.answer(partial(state.read_run, gateway.runtime.database, _id(run_id)))


@router.post("/runs/{run_id}/approve", status_code=HTTPStatus.ACCEPTED, responses=DECIDED)
async def approve(run_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Approve the plan of a run that waits for it: a worker applies it."""
    return await _decide(gateway, state.approve, _id(run_id))


@router.post("/runs/{run_id}/reject", status_code=HTTPStatus.ACCEPTED, responses=DECIDED)
async def reject(run_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Reject the plan of a run that waits for approval: nothing of it is applied."""
    return await _decide(gateway, state.reject, _id(run_id))


# A case's id is its maker's own and may hold slashes.
@router.post("/restore/{case_id:path}", responses=RESTORED)
async def restore(case_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Make an archived case active again, as it was; it is spared for some days."""
    return await gateway.answer(lambda: _restore(gateway, case_id))


async def _begun(gateway: Gateway, request: Request, wait: float, *, dry_run: bool) -> Response:
    """Request a run of the workers, and answer with what became of it within `wait` seconds.

    The run is a row before this waits: it goes on if the client disconnects or the gateway stops.
    """
    await _without_members(request)
    runtime = gateway.runtime
    run_id = await gateway.in_thread(partial(state.request, runtime.database, runtime.clock, dry_run=dry_run))
    await gateway.in_thread(runtime.wake.casebank)
    at_rest = partial(state.at_rest, runtime.database, run_id)
    await gateway.until(at_rest, min(wait, requests.LONGEST_WAIT_S), request)
    return await gateway.answer_as(partial(_as_answer, gateway, run_id))


def _as_answer(gateway: Gateway, run_id: UUID) -> tuple[dict[str, Any], int]:
    database = gateway.runtime.database
    standing = state.read_progress(database, run_id)
    if standing["finished_at"] is not None:
        answer, status = state.result(database, run_id), HTTPStatus.OK
    elif standing["phase"] == state.Phase.WAITING_APPROVAL:
        answer, status = state.result(database, run_id), HTTPStatus.ACCEPTED
    else:
        answer, status = standing, HTTPStatus.ACCEPTED
    return answer, status


async def _decide(gateway: Gateway, decide: Callable[..., None], run_id: UUID) -> Response:
    def decided() -> dict[str, Any]:
        decide(gateway.runtime.database, run_id, _WHO)
        gateway.runtime.wake.casebank()
        return state.read_run(gateway.runtime.database, run_id)

    return await gateway.answer(decided, HTTPStatus.ACCEPTED)


def _restore(gateway: Gateway, case_id: str) -> dict[str, str]:
    archive.restore(gateway.runtime.database, requests.parse_name(case_id, "archived case"))
    return {"case_id": case_id, "status": "restored"}


async def _without_members(request: Request) -> None:
    """Refuse members, such as `dry_run`, before anything begins: a caller may have meant the other route."""
    body = await requests.read_body(request)
    given = requests.parse_object(body) if body.strip() else {}
    if given:
        unknown = first_line(", ".join(sorted(given)), 200)
        raise InvalidRequest(f"The body has members that are not known: {unknown}.")


def _id(text: str) -> UUID:
    return requests.parse_id(text, "run of the CaseBank")
