"""`/v1/turns`: what became of a message, and what people say of that."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response

from perdure.channels.http import requests
from perdure.channels.http.gateway import TheGateway
from perdure.channels.http.schema import CANCELLING, DECIDING, DECISION, FEEDBACK, THANKED, TURN
from perdure.channels.http.tenant_access import TheTurn
from perdure.runtime import Runtime
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.cancel import cancel as cancel_turn
from perdure.turns.feedback import give_feedback, parse_feedback
from perdure.turns.reading import SETTLED, read_turn

router = APIRouter(prefix="/turns/{turn_id}", tags=["turns"])


@router.get("", responses=TURN)
async def read(turn_id: TheTurn, request: Request, gateway: TheGateway, wait: requests.Wait = None) -> Response:
    """Read a turn; with `wait`, as soon as it is settled, or with its present status when the time is up."""
    reading = partial(read_turn, gateway.runtime.database, turn_id)
    if wait and (await gateway.in_thread(reading))["status"] not in SETTLED:
        await gateway.until_settled(turn_id, min(wait, requests.LONGEST_WAIT_S), request)
    return await gateway.answer(reading)


@router.post("/cancel", status_code=HTTPStatus.ACCEPTED, responses=CANCELLING)
async def cancel(turn_id: TheTurn, gateway: TheGateway) -> Response:
    """Cancel a turn: at once if it has not begun, else at its next safe point. A settled one stays as it is."""
    await gateway.in_thread(lambda: cancel_turn(gateway.runtime, turn_id))
    return await gateway.answer(partial(read_turn, gateway.runtime.database, turn_id), HTTPStatus.ACCEPTED)


@router.post("/approval", status_code=HTTPStatus.ACCEPTED, responses=DECIDING, openapi_extra=DECISION)
async def approval(turn_id: TheTurn, request: Request, gateway: TheGateway) -> Response:
    """Approve or deny a call that waits, by its id in `pending_approvals`; with `arguments`, these are what is run."""
    body = await requests.read_body(request)
    return await gateway.answer(lambda: _decide(gateway.runtime, turn_id, body), HTTPStatus.ACCEPTED)


@router.post("/feedback", status_code=HTTPStatus.ACCEPTED, responses=THANKED, openapi_extra=FEEDBACK)
async def feedback(turn_id: TheTurn, request: Request, gateway: TheGateway) -> Response:
    """Say whether a reply was of use, 1 or -1; the last word counts. What is praised is learnt as a case."""
    body = await requests.read_body(request)
    return await gateway.answer(lambda: _feedback(gateway.runtime, turn_id, body), HTTPStatus.ACCEPTED)


def _feedback(runtime: Runtime, turn_id: UUID, body: bytes) -> dict[str, Any]:
    give_feedback(runtime, turn_id, parse_feedback(requests.parse_object(body)))
    return read_turn(runtime.database, turn_id)


def _decide(runtime: Runtime, turn_id: UUID, body: bytes) -> dict[str, Any]:
    decide(runtime, turn_id, parse_decision(requests.parse_object(body)))
    return read_turn(runtime.database, turn_id)
