"""`POST /v1/messages`: the way in."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response

from perdure.channels.http import requests
from perdure.channels.http.gateway import TheGateway
from perdure.channels.http.schema import ACCEPTED, INCOMING
from perdure.channels.http.tenant_access import TheUsers
from perdure.runtime import Runtime
from perdure.turns.inbox import accept as accepting
from perdure.turns.inbox.incoming import parse_incoming

router = APIRouter(tags=["messages"])


@router.post("/messages", status_code=HTTPStatus.ACCEPTED, responses=ACCEPTED, openapi_extra=INCOMING)
async def accept(request: Request, gateway: TheGateway, users: TheUsers) -> Response:
    """Accept a message: once this has answered, the message is answered, whatever dies.

    The same `(user_id, channel, message_id)` again answers 200 with the ids of the first time.
    """
    gateway.admit()
    body = await requests.read_body(request)
    return await gateway.answer_as(lambda: _accept(gateway.runtime, users.tenant, body))


def _accept(runtime: Runtime, tenant: str | None, body: bytes) -> tuple[dict[str, Any], int]:
    accepted = accepting.accept(runtime, parse_incoming(requests.parse_object(body), tenant=tenant))
    answer = {
        "turn_id": str(accepted.turn_id),
        "session_id": str(accepted.session_id),
        "seq": accepted.seq,
        "status": accepted.status,
        "duplicate": accepted.duplicate,
    }
    return answer, HTTPStatus.OK if accepted.duplicate else HTTPStatus.ACCEPTED
