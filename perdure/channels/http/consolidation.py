"""`/v1/consolidation`: the CaseBank is pruned, decided about and restored from, by administrators."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response

from perdure.casebank import archive, prune, runs
from perdure.channels.http import requests
from perdure.channels.http.gateway import Gateway, TheAdministrator, TheGateway
from perdure.channels.http.schema import DECIDED, DRY_RUN, PRUNED, PRUNING_RUN, RESTORED
from perdure.channels.notices import bank_of
from perdure.errors import InvalidRequest
from perdure.untrusted import first_line

router = APIRouter(prefix="/consolidation", tags=["casebank"])

_WHO = "an admin key"


@router.post("/run", responses=PRUNED)
async def run(request: Request, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Prune the CaseBank; answers when that is finished, or with the plan where it waits for approval."""
    await _without_members(request)
    done = await gateway.at_length(partial(prune.run, bank_of(gateway.runtime)))
    waits = done["phase"] == runs.Phase.WAITING_APPROVAL
    return await _answer(gateway, done, HTTPStatus.ACCEPTED if waits else HTTPStatus.OK)


@router.post("/dry-run", responses=DRY_RUN)
async def dry_run(request: Request, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Make the plan that a run would make now, and change nothing."""
    await _without_members(request)
    made = await gateway.at_length(partial(prune.dry_run, bank_of(gateway.runtime)))
    return await _answer(gateway, made, HTTPStatus.OK)


@router.get("/runs/{run_id}", responses=PRUNING_RUN)
async def read(run_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Read where a run stands, its plan and its outcome."""
    return await gateway.answer(partial(runs.read_run, gateway.runtime.database, _id(run_id)))


@router.post("/runs/{run_id}/approve", status_code=HTTPStatus.ACCEPTED, responses=DECIDED)
async def approve(run_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Approve the plan of a run that waits for it: a worker applies it within a minute."""
    return await _decide(gateway, runs.approve, _id(run_id))


@router.post("/runs/{run_id}/reject", status_code=HTTPStatus.ACCEPTED, responses=DECIDED)
async def reject(run_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Reject the plan of a run that waits for approval: nothing of it is applied."""
    return await _decide(gateway, runs.reject, _id(run_id))


# A case's id is its maker's own and may hold slashes.
@router.post("/restore/{case_id:path}", responses=RESTORED)
async def restore(case_id: str, gateway: TheGateway, _admin: TheAdministrator) -> Response:
    """Make an archived case active again, as it was; it is spared for some days."""
    return await gateway.answer(lambda: _restore(gateway, case_id))


async def _decide(gateway: Gateway, decide: Callable[..., None], run_id: UUID) -> Response:
    def decided() -> dict[str, Any]:
        decide(gateway.runtime.database, run_id, _WHO)
        return runs.read_run(gateway.runtime.database, run_id)

    return await gateway.answer(decided, HTTPStatus.ACCEPTED)


def _restore(gateway: Gateway, case_id: str) -> dict[str, str]:
    archive.restore(gateway.runtime.database, requests.parse_name(case_id, "archived case"))
    return {"case_id": case_id, "status": "restored"}


async def _answer(gateway: Gateway, told: dict[str, Any], status: HTTPStatus) -> Response:
    body = await gateway.in_thread(lambda: json.dumps(told, ensure_ascii=False).encode())
    return Response(body, status, media_type="application/json")


async def _without_members(request: Request) -> None:
    """Whoever sends `{"dry_run": true}` to the wrong route is told so before anything is removed."""
    body = await requests.read_body(request)
    given = requests.parse_object(body) if body.strip() else {}
    if given:
        unknown = first_line(", ".join(sorted(given)), 200)
        raise InvalidRequest(f"The body has members that are not known: {unknown}.")


def _id(text: str) -> UUID:
    return requests.parse_id(text, "run of the CaseBank")
